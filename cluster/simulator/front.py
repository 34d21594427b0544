"""The router's part in virtual time: the product's placer, gates and drain rate, and what a request goes through.

    arrive -> place on P and D -> gate of P -> D reserves -> P computes, the client has its first token
           -> KV at D -> D decodes -> end

What happens when workers die or give up is as in `router/request_life.py`: KV that a prefill worker still has goes to
another decode worker; what was being decoded is computed again, with all that was said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...proto.kv_layout import block_count
from ...router.drain_rate import DrainRate
from ...router.life_messages import Peer
from ...router.outstanding import LegId
from ...router.placement.policy import Demand
from ...router.prefix_index import Prefix
from .clock import Clock
from .decode import DecodeWorker
from .members import Members
from .prefill import PrefillWorker
from .request import Arrival, Flight, WorkerLegKey, again, flight_of
from .results import Results
from .spec import Cluster
from .worker import Worker


class Router:
    """One router over all workers. Everything that ends is told to `results`."""

    def __init__(self, clock: Clock, cluster: Cluster, results: Results, seed: int) -> None:
        self._clock, self._cluster, self._results = clock, cluster, results
        self._members = Members(cluster, seed)
        self._placer = self._members.placer
        self._at_gate: dict[LegId, Flight] = {}
        self._unplaced: list[Flight] = []
        self._drain = DrainRate(0.0)
        self.flights: dict[int, Flight] = {}
        self.drained: Callable[[Worker], None] = lambda worker: None

    # ---- workers ---------------------------------------------------------------------------------------------------

    def worker_up(self, worker: Worker) -> None:
        """It takes requests from now on."""
        self._members.up(worker)
        waiting, self._unplaced = self._unplaced, []
        for flight in waiting:
            self._place(flight)

    def worker_drains(self, worker: Worker) -> None:
        """It takes no more requests."""
        worker.draining = True
        self._members.closes(worker)
        self._look_if_drained(worker)

    def worker_lost(self, worker: Worker) -> None:
        """It died: whom it had goes on elsewhere."""
        peer = worker.peer
        self._members.lost(worker)
        if isinstance(worker, PrefillWorker):
            worker.lose()
            mine = [flight for flight in self.flights.values() if flight.prefill == peer and not flight.joined]
            for flight in sorted(mine, key=lambda flight: flight.number):
                self._begin_again(flight, flight.generated + (flight.first_at is not None and flight.computed))
        elif isinstance(worker, DecodeWorker):
            said = {flight.number: count for flight, count in worker.lose()}
            for flight in [flight for flight in self.flights.values() if flight.decode == peer]:
                count = said.get(flight.number)
                if flight.joined or count is not None:
                    self._begin_again(flight, count if count is not None else flight.generated + 1)
                elif flight.here:
                    self._begin_again(flight, flight.generated)
                elif flight.leg_id in self._at_gate or flight in self._unplaced:
                    self._rebook(flight)
                else:
                    self._rebook(flight)
                    self._reserve(flight)

    def _rebook(self, flight: Flight) -> None:
        """Another decode worker for a leg that keeps its prefill worker."""
        self._placer.over("decode", flight.leg_id)
        flight.ticket = False
        demand, prefix = _demand(flight), Prefix(flight.leg.tokens, "")
        choice = self._members.choose("decode", demand, prefix)
        if choice is None:
            self._begin_again(flight, flight.generated + flight.computed)
            return
        self._placer.to_decode(flight.leg_id, choice.peer, demand, prefix)
        flight.decode = choice.peer

    # ---- a request's way -------------------------------------------------------------------------------------------

    def arrive(self, number: int, arrival: Arrival) -> None:
        """A request comes to the front door."""
        rules = self._cluster.rules
        flight = flight_of(number, arrival, self._clock.now + rules.request_s)
        if not self._fits(flight):
            self._results.too_long(flight)
            return
        if len(self.flights) >= rules.max_inflight:
            surplus = len(self.flights) - rules.max_inflight + 1
            self._results.refused(flight, self._drain.hint_s(surplus, self._clock.now))
            return
        self.flights[number] = flight
        self._later(self._cluster.overheads.router_s / 2, self._place, flight)

    def _place(self, flight: Flight) -> None:
        if flight.number not in self.flights:
            return
        demand, prefix = _demand(flight), Prefix(flight.leg.tokens, "")
        self._members.hear()
        places = self._members.place(demand, prefix, flight.leg.remaining > 1)
        if places is None:
            self._unplaced.append(flight)
            return
        if places.late_s and flight.attempt == 1:
            self._over(flight)
            self._results.refused(flight, places.late_s)
            return
        flight.prefill, flight.decode = places.prefill, places.decode
        if (computes := places.prefill or places.decode) is not None:
            self._placer.to_prefill(flight.leg_id, computes, demand, prefix)
        if places.decode is not None:
            self._placer.to_decode(flight.leg_id, places.decode, demand, prefix)
        if places.prefill is None:
            self._results.on_decode += flight.attempt == 1
            self._reserve(flight)
            return
        self._at_gate[flight.leg_id] = flight
        self._open(self._members.gates[places.prefill].enter(flight.leg_id, demand.tokens, priority=0, tenant=""))

    def _open(self, legs: Iterable[LegId]) -> None:
        for leg in legs:
            self._reserve(self._at_gate.pop(leg))

    def _reserve(self, flight: Flight) -> None:
        if flight.decode is None:
            self._later(self._cluster.overheads.message_s, self._submit, flight.leg_id)
        else:
            self._later(self._cluster.overheads.message_s, self._ask, flight.leg_id)

    def _ask(self, leg: LegId) -> None:
        flight = self._current(leg)
        decode = self._members.decode(flight.decode) if flight is not None else None
        if flight is not None and decode is not None and not decode.has(flight):
            decode.reserve(flight)

    def granted(self, flight: Flight) -> None:
        """See Front."""
        if flight.computed:
            self._send_kv(flight, 0.0)
        else:
            self._later(2 * self._cluster.overheads.message_s, self._submit, flight.leg_id)

    def _submit(self, leg: LegId) -> None:
        flight = self._current(leg)
        prefill = self._members.prefill(flight.prefill) if flight is not None else None
        if flight is not None and prefill is not None and not flight.submitted:
            flight.submitted = True
            prefill.submit(flight)

    def computed(self, flight: Flight) -> None:
        """See Front."""
        overheads, now = self._cluster.overheads, self._clock.now
        flight.computed = True
        self.first_token(flight)
        self._later(overheads.message_s, self._prefill_over, (flight.leg_id, flight.prefill))
        if flight.decode is None:
            if flight.prefill is not None:
                self._members.prefills[flight.prefill].release(flight.leg.key)
            self.ended(flight)
        elif flight.ticket:
            self._send_kv(flight, now - flight.begun_at)

    def first_token(self, flight: Flight) -> None:
        """See Front. What is said again after a retry is not new to the client."""
        overheads = self._cluster.overheads
        if flight.first_at is None:
            flight.first_at = self._clock.now + overheads.message_s + overheads.router_s / 2

    def _prefill_over(self, where: tuple[LegId, Peer | None]) -> None:
        leg, peer = where
        self._placer.over("prefill", leg)
        gate = self._members.gate(peer)
        if gate is not None:
            self._open(gate.leave(leg))

    def _send_kv(self, flight: Flight, computed_s: float) -> None:
        fresh = flight.leg.length
        self._later(self._cluster.transfer.exposed_s(fresh, computed_s), self._arrived, flight.leg_id)

    def _arrived(self, leg: LegId) -> None:
        flight = self._current(leg)
        decode = self._members.decode(flight.decode) if flight is not None else None
        if flight is not None and decode is not None and flight.ticket:
            decode.arrived(flight)

    def committed(self, flight: Flight) -> None:
        """See Front."""
        flight.joined = True
        prefill = self._members.prefill(flight.prefill)
        if prefill is not None:
            self._later(2 * self._cluster.overheads.message_s, self._release, (prefill, flight.leg.key))
        elif flight.here:
            self._later(self._cluster.overheads.message_s, self._prefill_over, (flight.leg_id, None))

    def _release(self, held: tuple[PrefillWorker, WorkerLegKey]) -> None:
        prefill, key = held
        prefill.release(key)
        self._look_if_drained(prefill)

    def ended(self, flight: Flight) -> None:
        """See Front."""
        overheads = self._cluster.overheads
        flight.ended_at = self._clock.now + overheads.message_s + overheads.router_s / 2
        self._over(flight)
        self._drain.ended(self._clock.now)
        self._results.served(flight)

    def _over(self, flight: Flight) -> None:
        self._placer.over("prefill", flight.leg_id)
        self._placer.over("decode", flight.leg_id)
        del self.flights[flight.number]
        if (decode := self._members.decode(flight.decode)) is not None:
            self._look_if_drained(decode)

    # ---- what goes wrong -------------------------------------------------------------------------------------------

    def refused(self, flight: Flight) -> None:
        """See Front: its reservation waited too long."""
        self._clock.at(self._clock.now, self._try_another, flight)

    def _try_another(self, flight: Flight) -> None:
        if flight.here:
            self._begin_again(flight, flight.generated)
            return
        flight.tries += 1
        if flight.tries > self._cluster.rules.attempts:
            self._fail(flight)
        else:
            self._rebook(flight)
            self._reserve(flight)

    def resumed(self, flight: Flight) -> None:
        """See Front."""
        self._results.preemptions += 1
        flight.joined = False

    def preempted(self, flight: Flight, generated: int) -> None:
        """See Front: placed again, which is no retry."""
        self._results.preemptions += 1
        self._clock.at(self._clock.now, self._preempted, (flight, generated))

    def _preempted(self, what: tuple[Flight, int]) -> None:
        self._leave_workers(what[0])
        self._next_attempt(*what)

    def _begin_again(self, flight: Flight, generated: int) -> None:
        flight.tries += 1
        self._leave_workers(flight)
        if flight.tries > self._cluster.rules.attempts:
            self._fail(flight)
        elif generated >= flight.arrival.output:
            self.ended(flight)
        else:
            self._results.retries += 1
            self._next_attempt(flight, generated)

    def _next_attempt(self, flight: Flight, generated: int) -> None:
        again(flight, generated)
        self._place(flight)

    def _leave_workers(self, flight: Flight) -> None:
        """Nothing of the leg is left at any worker or gate."""
        if (prefill := self._members.prefill(flight.prefill)) is not None:
            prefill.cancel(flight)
        if (decode := self._members.decode(flight.decode)) is not None:
            decode.cancel(flight)
        self._at_gate.pop(flight.leg_id, None)
        self._prefill_over((flight.leg_id, flight.prefill))
        self._placer.over("decode", flight.leg_id)
        flight.prefill = flight.decode = None

    def _fail(self, flight: Flight) -> None:
        self._leave_workers(flight)
        self._over(flight)
        self._results.failed(flight)

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests at the gates, and those for which there is no worker."""
        return len(self._at_gate) + len(self._unplaced)

    def _fits(self, flight: Flight) -> bool:
        """Whether the workers could run it alone; live ones refuse what they could not."""
        size, leg = self._cluster.block_size, flight.leg
        fits_prefill = block_count(leg.length, size) <= self._cluster.prefill.blocks
        return fits_prefill and block_count(leg.last, size) <= self._cluster.decode.blocks

    def _current(self, leg: LegId) -> Flight | None:
        """Whose leg this is; None: the request has ended, or is at another attempt."""
        flight = self.flights.get(int(leg.request_id))
        return flight if flight is not None and flight.leg_id == leg else None

    def _later(self, delay_s: float, act: Callable[[Any], None], argument: Any) -> None:
        if delay_s:
            self._clock.at(self._clock.now + delay_s, act, argument)
        else:
            act(argument)

    def _look_if_drained(self, worker: Worker) -> None:
        if worker.draining and worker.idle:
            self.drained(worker)


def _demand(flight: Flight) -> Demand:
    return Demand(flight.leg.length, flight.leg.remaining, 1, flight.arrival.session)
