"""A cluster in virtual time for `placement.py`: the product's placer and gates, before workers in virtual time.

Transfers are hidden and messages take no time; the router hears what the workers report of their prefix caches and of
the law of their steps, as it does from live ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

from baton.benchmarks.placement_workers import Clock, DecodeWorker, Machine, PrefillWorker, Request, Worker
from baton.router.gate import LookaheadGate
from baton.router.life_messages import Peer
from baton.router.outstanding import LegId
from baton.router.placement.choose import Objectives
from baton.router.placement.disaggregation import ALWAYS
from baton.router.placement.policy import Choice, Demand
from baton.router.placer import Placer
from baton.router.prefix_index import Prefix

LOOKAHEAD = 2


class Cluster:
    """The router's part of the work, over the product's placer and gates."""

    def __init__(
        self,
        machine: Machine,
        names: tuple[str, str],
        objectives: Objectives,
        told: bool,
        seed: int,
        disaggregation: str = ALWAYS,
    ) -> None:
        self.clock, rng = Clock(), random.Random(seed)
        self.refused: list[Request] = []
        self._placer = Placer(names, objectives, told, rng, disaggregation)
        self.prefills: dict[Peer, PrefillWorker] = {}
        for number in range(machine.prefills):
            prefill = PrefillWorker(self.clock, machine, f"p{number}", machine.prefill_law, rng, self._computed)
            self.prefills[prefill.peer] = prefill
        self.decodes: dict[Peer, DecodeWorker] = {}
        for number in range(machine.decodes):
            decode = DecodeWorker(self.clock, machine, f"d{number}", rng, self._computed, self._ended)
            self.decodes[decode.peer] = decode
        self._gates = {peer: LookaheadGate(LOOKAHEAD * machine.step_tokens) for peer in self.prefills}
        self._places: dict[LegId, tuple[Request, PrefillWorker | None, DecodeWorker]] = {}
        self.computed_on_decode = 0
        for role, worker in self._workers():
            self._placer.index.worker_up(worker.peer, worker.welcome(role))
            if self._placer.watches(role):
                worker.feed.watch(1)

    def run(self, requests: Iterator[Request]) -> list[Request]:
        """Until all, which come in order of arrival, have been served or refused."""
        seen: list[Request] = []
        self._next(requests, seen)
        self.clock.run()
        return seen

    def _workers(self) -> list[tuple[str, Worker]]:
        """Each with its role."""
        prefills, decodes = self.prefills.values(), self.decodes.values()
        return [*(("prefill", worker) for worker in prefills), *(("decode", worker) for worker in decodes)]

    def _next(self, requests: Iterator[Request], seen: list[Request]) -> None:
        if (request := next(requests, None)) is not None:
            seen.append(request)
            self.clock.at(request.at, self._arrive, request)
            self.clock.at(request.at, self._next, requests, seen)

    def _arrive(self, request: Request) -> None:
        demand, prefix = Demand(len(request.prompt), request.output, 1, ""), Prefix(request.prompt, "")
        self._hear()
        choices = [self._choose(role, demand, prefix) for role in ("prefill", "decode")]
        if any(choice.late_s for choice in choices):
            self.refused.append(request)
            request.prompt = ()
            return
        prefill, decode = self.prefills[choices[0].peer], self.decodes[choices[1].peer]
        if here := self._placer.computes_here(demand, prefix, prefill.site("prefill"), decode.site("decode")):
            self.computed_on_decode += 1
        self._places[request.leg] = request, None if here else prefill, decode
        self._placer.to_prefill(request.leg, decode.peer if here else prefill.peer, demand, prefix)
        self._placer.to_decode(request.leg, decode.peer, demand, prefix)
        if here:
            decode.reserve(request, partial(decode.compute, request))
            return
        self._open(self._gates[prefill.peer].enter(request.leg, len(request.prompt), priority=0, tenant=""))

    def _choose(self, role: str, demand: Demand, prefix: Prefix) -> Choice:
        sites = [worker.site(role) for known, worker in self._workers() if known == role]
        choice = self._placer.choose(role, demand, prefix, sites, None, prefer=None, avoid=(), may_use_avoided=True)
        if choice is None:
            raise RuntimeError("there is no worker")
        return choice

    def _hear(self) -> None:
        """What the workers said about their prefix caches since."""
        for _, worker in self._workers():
            for _, event in worker.feed.take():
                self._placer.index.changed(worker.peer, event.prefixes)

    def _open(self, legs: Sequence[LegId]) -> None:
        for leg in legs:
            request, prefill, decode = self._places[leg]
            if prefill is not None:
                decode.reserve(request, partial(self._submit, prefill, request))

    @staticmethod
    def _submit(prefill: PrefillWorker, request: Request, cached: int) -> None:
        prefill.submit(request)

    def _computed(self, request: Request) -> None:
        request.first_at = self.clock.now
        _, prefill, decode = self._places[request.leg]
        self._placer.over("prefill", request.leg)
        if request.output > 1:
            decode.join(request)
        else:
            decode.release(request)
            self._ended(request)
        if prefill is not None:
            self._open(self._gates[prefill.peer].leave(request.leg))

    def _ended(self, request: Request) -> None:
        request.ended_at = self.clock.now
        request.prompt = ()  # of long traces only what is live is kept
        self._placer.over("decode", request.leg)
        del self._places[request.leg]
