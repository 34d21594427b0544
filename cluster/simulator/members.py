"""The workers that a simulated router knows: where requests can be placed, and each prefill worker's gate."""

from __future__ import annotations

import random
from typing import NamedTuple

from ...router.gate import LookaheadGate
from ...router.life_messages import Peer
from ...router.placement.disaggregation import ALWAYS, NEVER
from ...router.placement.policy import Choice, Demand
from ...router.placer import Placer, Site
from ...router.prefix_index import Prefix
from .decode import DecodeWorker
from .prefill import PrefillWorker
from .spec import Cluster, Role
from .worker import Worker


class Places(NamedTuple):
    """Where a leg goes. Without a prefill worker its decode worker computes the prompt. `late_s`: beyond objectives."""

    prefill: Peer | None
    decode: Peer | None
    late_s: float


class Members:
    """With the product's placer over them."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        rules = cluster.rules
        self._step_tokens, self._lookahead = cluster.prefill.max_batch_tokens, cluster.prefill.lookahead
        names = (rules.prefill_placement, rules.decode_placement)
        rng = random.Random(seed)
        self.placer = Placer(names, rules.objectives, rules.prefix_events, rng, cluster.disaggregation)
        self.gates: dict[Peer, LookaheadGate] = {}
        self.prefills: dict[Peer, PrefillWorker] = {}
        self.decodes: dict[Peer, DecodeWorker] = {}
        self._sites: dict[Role, list[Site]] = {"prefill": [], "decode": []}  # of those that take requests
        self._watched: list[Worker] = []

    def up(self, worker: Worker) -> None:
        """It takes requests from now on."""
        site = worker.site()
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

    def place(self, demand: Demand, prefix: Prefix, needs_decode: bool) -> Places | None:
        """Workers for a leg, as `router/dispatch.py` chooses them; None: there are none."""
        where = self.placer.disaggregation
        first = self.choose("prefill", demand, prefix) if where != NEVER else None
        wants_decode = needs_decode or (first is None and where != ALWAYS)
        second = self.choose("decode", demand, prefix) if wants_decode else None
        if second is not None and where != ALWAYS and self._computes_here(demand, prefix, first, second):
            return Places(None, second.peer, second.late_s)
        if first is None or (needs_decode and second is None):
            return None
        late_s = max(first.late_s, second.late_s if second is not None else 0.0)
        return Places(first.peer, second.peer if second is not None else None, late_s)

    def _computes_here(self, demand: Demand, prefix: Prefix, first: Choice | None, second: Choice) -> bool:
        prefill = self._site("prefill", first.peer) if first is not None else None
        return self.placer.computes_here(demand, prefix, prefill, self._site("decode", second.peer))

    def _site(self, role: Role, peer: Peer) -> Site:
        return next(site for site in self._sites[role] if site.peer == peer)

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
