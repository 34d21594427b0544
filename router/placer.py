"""Where legs go: the pool's policies over all that this router knows of its workers. Pure: a simulator runs it too."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..proto import worker_pb2 as pb
from ..proto.step_time import StepTime
from .life_messages import Peer
from .outstanding import LegId, Outstanding, Work
from .placement.choose import DECODE, PREFILL, Objectives, choose
from .placement.disaggregation import ALWAYS, POLICIES
from .placement.policy import Candidate, Candidates, Choice, Demand, Policy
from .prefix_index import Prefix, PrefixIndex
from .transfer_rates import TransferRates


class Site(NamedTuple):
    """A ready worker: the machine that it is on, what it said of itself, and its latest load."""

    peer: Peer
    host: str
    welcome: pb.Welcome
    load: pb.Load


class Placer:
    """`names`: of the policies for the prefill and the decode pool. `told`: see PrefixIndex. `disaggregation`: a name
    in placement/disaggregation.py."""

    def __init__(
        self,
        names: tuple[str, str],
        objectives: Objectives,
        told: bool,
        rng: random.Random,
        disaggregation: str = ALWAYS,
    ) -> None:
        self._policies: dict[str, Policy] = {
            "prefill": PREFILL[names[0]](objectives),
            "decode": DECODE[names[1]](objectives),
        }
        self._loads = {"prefill": Outstanding(), "decode": Outstanding()}
        self._rng = rng
        self.disaggregation = disaggregation
        self.on_decode = POLICIES[disaggregation]
        self._tpot_s = objectives.tpot_s
        self.index = PrefixIndex(told)
        self.rates = TransferRates()

    def watches(self, role: str) -> bool:
        """Whether the workers of this pool are to say which prefixes they hold."""
        return self.index.told and self._policies[role].uses_prefixes

    def choose(
        self,
        role: str,
        demand: Demand,
        prefix: Prefix,
        sites: Sequence[Site],
        source: Site | None,
        *,
        prefer: Peer | None,
        avoid: Collection[Peer],
        may_use_avoided: bool,
    ) -> Choice | None:
        """The worker for a leg, whose KV comes from `source` (for a decode worker); None when there is none."""
        policy, loads = self._policies[role], self._loads[role]
        ways: list[float] = []
        if source is not None and policy.uses_distances:
            ways = self.rates.distances(source.host, [site.host for site in sites])
        candidates = Candidates(
            len(sites),
            lambda place: self._candidate(role, sites[place], prefix, ways[place] if ways else 1.0, policy.uses_laws),
            lambda: loads.all_tokens(site.peer for site in sites),
        )
        return choose(
            policy,
            demand,
            candidates,
            self._rng,
            prefer=prefer,
            avoid=avoid,
            may_use_avoided=may_use_avoided,
        )

    def computes_here(self, demand: Demand, prefix: Prefix, prefill: Site | None, decode: Site) -> bool:
        """Whether the decode worker computes the leg's prompt; without a prefill worker it does, if it ever may."""
        if prefill is None:
            return self.disaggregation != ALWAYS
        late_s = self.rates.late_s(prefill.host, decode.host)
        away, there = self._candidate("prefill", prefill, prefix, 1.0), self._candidate("decode", decode, prefix, 1.0)
        law = decode.load.prefill_time
        known = StepTime(law.a, law.b, law.c) if decode.load.HasField("prefill_time") else None
        here = self._candidate("prefill", decode, prefix, 1.0)._replace(law=known)
        return self.on_decode(demand, away, there, here, late_s, self._tpot_s)

    def to_prefill(self, leg: LegId, peer: Peer, demand: Demand, prefix: Prefix) -> None:
        """The leg's prompt is computed on that worker."""
        cached = self._cached("prefill", peer, prefix)
        self._loads["prefill"].add(leg, peer, Work(demand.tokens - cached, demand.tokens**2 - cached**2, 1))
        self._sent("prefill", peer, prefix)

    def to_decode(self, leg: LegId, peer: Peer, demand: Demand, prefix: Prefix) -> None:
        """The leg was placed on that decode worker."""
        self._loads["decode"].add(leg, peer, Work(demand.tokens + demand.output * demand.choices, 0, demand.choices))
        self._sent("decode", peer, prefix)

    def over(self, role: str, leg: LegId) -> None:
        """The leg occupies its worker of that pool no more."""
        self._loads[role].remove(leg)

    def _candidate(self, role: str, site: Site, prefix: Prefix, distance: float, laws: bool = True) -> Candidate:
        """`laws`: whether somebody looks at the law, which takes time to read."""
        loads, law = self._loads[role], None
        if laws and site.load.HasField("step_time"):
            law = StepTime(site.load.step_time.a, site.load.step_time.b, site.load.step_time.c)
        return Candidate(
            site.peer,
            loads.tokens(site.peer),
            loads.works(site.peer),
            self._cached(role, site.peer, prefix),
            law,
            max(1, site.welcome.max_batch_tokens),
            distance,
        )

    def _cached(self, role: str, peer: Peer, prefix: Prefix) -> int:
        return self.index.cached(peer, prefix) if self._policies[role].uses_prefixes else 0

    def _sent(self, role: str, peer: Peer, prefix: Prefix) -> None:
        if self._policies[role].uses_prefixes:
            self.index.sent(peer, prefix)
