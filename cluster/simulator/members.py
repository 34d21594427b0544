"""The workers that a simulated router knows: where requests can be placed, and each prefill worker's gate."""

from __future__ import annotations

import random

from ...router.gate import LookaheadGate
from ...router.life_messages import Peer
from ...router.placement.policy import Choice, Demand
from ...router.placer import Placer, Site
from ...router.prefix_index import Prefix
from .decode import DecodeWorker
from .prefill import PrefillWorker
from .spec import Cluster, Role
from .worker import Worker


class Members:
    """With the product's placer over them."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        rules = cluster.rules
        self._step_tokens, self._lookahead = cluster.prefill.max_batch_tokens, cluster.prefill.lookahead
        names = (rules.prefill_placement, rules.decode_placement)
        self.placer = Placer(names, rules.objectives, rules.prefix_events, random.Random(seed))
        self.gates: dict[Peer, LookaheadGate] = {}
        self.prefills: dict[Peer, PrefillWorker] = {}
        self.decodes: dict[Peer, DecodeWorker] = {}
        self._sites: dict[Role, list[Site]] = {"prefill": [], "decode": []}  # of those that take requests
        self._watched: list[Worker] = []

    def up(self, worker: Worker) -> None:
        """It takes requests from now on."""
        site = worker.site(self._step_tokens)
        self.placer.index.worker_up(worker.peer, site.welcome)
        if self.placer.watches(worker.role):
            worker.feed.watch(1)
            self._watched.append(worker)
        self._sites[worker.role].append(site)
        if isinstance(worker, PrefillWorker):
            self.prefills[worker.peer] = worker
            self.gates[worker.peer] = LookaheadGate(self._lookahead * self._step_tokens)
        elif isinstance(worker, DecodeWorker):
            self.decodes[worker.peer] = worker

    def closes(self, worker: Worker) -> None:
        """It takes no more requests."""
        self._sites[worker.role] = [site for site in self._sites[worker.role] if site.peer != worker.peer]

    def lost(self, worker: Worker) -> None:
        """It is gone."""
        self.closes(worker)
        self.placer.index.worker_lost(worker.peer)
        self._watched = [watched for watched in self._watched if watched is not worker]
        self.gates.pop(worker.peer, None)
        self.prefills.pop(worker.peer, None)
        self.decodes.pop(worker.peer, None)

    def hear(self) -> None:
        """What the workers said about their prefix caches since."""
        for worker in self._watched:
            for _, event in worker.feed.take():
                self.placer.index.changed(worker.peer, event.prefixes)

    def choose(self, role: Role, demand: Demand, prefix: Prefix) -> Choice | None:
        """A worker for a leg; None: there is none."""
        sites = self._sites[role]
        return self.placer.choose(role, demand, prefix, sites, None, prefer=None, avoid=(), may_use_avoided=True)

    def prefill(self, peer: Peer | None) -> PrefillWorker | None:
        """That worker, if it is here."""
        return self.prefills.get(peer) if peer is not None else None

    def decode(self, peer: Peer | None) -> DecodeWorker | None:
        """Likewise."""
        return self.decodes.get(peer) if peer is not None else None

    def gate(self, peer: Peer | None) -> LookaheadGate | None:
        """Of that prefill worker, if it is here."""
        return self.gates.get(peer) if peer is not None else None
