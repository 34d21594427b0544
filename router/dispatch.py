"""Legs to workers: chooses them, holds legs back at the lookahead gates, and sends the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Exhausted, Unavailable
from . import life_messages as m
from .gate import LookaheadGate
from .life_messages import LegKey, Peer
from .live import Live
from .outstanding import LegId, Room
from .placement.disaggregation import ALWAYS, NEVER
from .placement.policy import Choice, Demand
from .placer import Placer, Site
from .prefix_index import Prefix
from .sessions import Session, SessionPool

RETRY_AFTER_S = 1.0


def model_of(session: Session) -> str:
    """Fingerprint of the model that the worker serves."""
    return session.welcome.model_fingerprint if session.welcome is not None else ""


def room(session: Session) -> Room:
    """What a decode worker could take in, by its latest load."""
    load, welcome = session.load, session.welcome or pb.Welcome()
    free, seats = welcome.total_blocks - load.used_blocks, welcome.max_sequences - load.running - load.held_legs
    return Room(free * welcome.block_size if not load.waiting else 0, seats)


def site(session: Session) -> Site:
    """A worker as the placer sees it."""
    host = session.member.address.rpartition(":")[0]
    return Site(session.member.peer, host, session.welcome or pb.Welcome(), session.load)


class Dispatcher:
    """What it finds out is reported through `report` as an event of the request's life."""

    def __init__(
        self,
        sessions: SessionPool,
        placer: Placer,
        report: Callable[[str, m.Event], None],
    ) -> None:
        self._sessions = sessions
        self.placer = placer
        self._report = report
        self._gates: dict[Peer, LookaheadGate] = {}
        self._at_gate: dict[LegId, tuple[Peer, float]] = {}
        self._unplaced: dict[LegId, tuple[Live, m.Place]] = {}  # legs that wait until a worker is ready

    # ---- workers come and go ---------------------------------------------------------------------------------------

    def worker_up(self, peer: Peer, welcome: pb.Welcome) -> None:
        """A session with a worker began."""
        self.placer.index.worker_up(peer, welcome)
        if self.placer.watches(welcome.role):
            self._watch(peer)
        if welcome.role == "prefill":
            self._gates[peer] = LookaheadGate(welcome.lookahead * welcome.max_batch_tokens)
        self.look_again()

    def look_again(self) -> None:
        """Workers may be ready that were not: places the legs that wait for one."""
        waiting, self._unplaced = self._unplaced, {}
        for live, action in waiting.values():
            self.place(live, action)

    def worker_lost(self, peer: Peer) -> None:
        """A session ended; to be called before the legs there are told."""
        self._gates.pop(peer, None)
        self.placer.index.worker_lost(peer)

    def prefixes_changed(self, peer: Peer, changes: pb.PrefixChanges) -> None:
        """The worker said which prefixes it holds."""
        if not self.placer.index.changed(peer, changes):
            self._watch(peer)

    def sent(self, live: Live, report: pb.Sent) -> None:
        """A leg's KV reached its decode worker."""
        placed = live.life.legs.get(report.leg.attempt)
        source = self._sessions.get(placed.prefill) if placed is not None and placed.prefill else None
        target = self._sessions.get(placed.decode) if placed is not None and placed.decode else None
        if source is not None and target is not None:
            way = site(source).host, site(target).host
            self.placer.rates.observe(*way, report.bytes, report.transfer_s)
            self.placer.rates.observe_late(*way, report.exposed_s)

    def _watch(self, peer: Peer) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.send(pb.RouterCommand(watch_prefixes=pb.WatchPrefixes()))

    # ---- placing ---------------------------------------------------------------------------------------------------

    def place(self, live: Live, action: m.Place) -> None:
        """Chooses the workers of a leg; reports Placed or Unplaceable, or waits with that until a worker comes."""
        if action.source is not None:
            self._place_beside(live, action, action.source)
            return
        demand, prefix = _demand(live, action), _prefix(live, action)
        prefill, first = None, None
        if self.placer.disaggregation != NEVER:
            prefill, first = self._choose("prefill", demand, prefix, self._sessions.ready("prefill"), None, action)
        decode, second = None, None
        if action.needs_decode or (prefill is None and self.placer.disaggregation != ALWAYS):
            ready = self._sessions.ready("decode")
            alike = [s for s in ready if prefill is None or model_of(s) == model_of(prefill)]
            decode, second = self._choose("decode", demand, prefix, alike, prefill, action)
        here = decode is not None and self._computes_here(demand, prefix, prefill, decode)
        if here:
            prefill, first = None, None
        elif prefill is None or (action.needs_decode and decode is None):
            error = _nobody("decode" if prefill else "prefill", action)
            if action.patient and error is not action.refused:
                self._unplaced[LegId(live.request_id, action.leg)] = live, action
            else:
                self._report(live.request_id, m.Unplaceable(action.leg, error))
            return
        late_s = max((choice.late_s for choice in (first, second) if choice is not None), default=0.0)
        if late_s and action.cause == "first":
            self._report(live.request_id, m.Unplaceable(action.leg, _late(late_s)))
            return
        leg_id = LegId(live.request_id, action.leg)
        first_peer, decode_peer = (s.member.peer if s is not None else None for s in (prefill, decode))
        if (computes := first_peer or decode_peer) is not None:
            self.placer.to_prefill(leg_id, computes, demand, prefix)
        if decode_peer is not None:
            self.placer.to_decode(leg_id, decode_peer, demand, prefix)
        live.record.placed(*(peer.worker_id if peer is not None else "" for peer in (first_peer, decode_peer)))
        self._report(live.request_id, m.Placed(action.leg, first_peer, decode_peer))

    def _computes_here(self, demand: Demand, prefix: Prefix, prefill: Session | None, decode: Session) -> bool:
        return self.placer.computes_here(demand, prefix, site(prefill) if prefill is not None else None, site(decode))

    def _place_beside(self, live: Live, action: m.Place, source: Peer) -> None:
        """Another decode worker for KV that `source` has; one with room for it now, where there is one."""
        demand, prefix = _demand(live, action), _prefix(live, action)
        session = self._sessions.get(source)
        model = model_of(session) if session is not None else ""
        others = [s for s in self._sessions.ready("decode") if model_of(s) == model and s.member.peer != source]
        most = len(live.request.prompt_ids) + live.life.max_tokens
        roomy = [s for s in others if room(s).fits(most) and s.member.peer not in action.avoid]
        decode, _ = self._choose("decode", demand, prefix, roomy or others, session, action)
        if decode is None:
            self._report(live.request_id, m.Unplaceable(action.leg, _nobody("decode", action)))
            return
        self.placer.to_decode(LegId(live.request_id, action.leg), decode.member.peer, demand, prefix)
        live.record.moved(decode.member.peer.worker_id)
        self._report(live.request_id, m.Placed(action.leg, source, decode.member.peer))

    def _choose(
        self,
        role: str,
        demand: Demand,
        prefix: Prefix,
        sessions: Sequence[Session],
        source: Session | None,
        action: m.Place,
    ) -> tuple[Session | None, Choice | None]:
        choice = self.placer.choose(
            role,
            demand,
            prefix,
            [site(session) for session in sessions],
            site(source) if source is not None else None,
            prefer=action.prefer if role == "prefill" else None,
            avoid=action.avoid,
            may_use_avoided=action.refused is None or role == "prefill",
        )
        return (None, None) if choice is None else (self._sessions.get(choice.peer), choice)

    # ---- the lookahead ---------------------------------------------------------------------------------------------

    def enter_gate(self, live: Live, action: m.EnterGate) -> None:
        """Holds the leg back until its prefill worker is about to run it; reports LetThrough then."""
        gate = self._gates.get(action.peer)
        if gate is None:
            self._report(live.request_id, m.WorkerLost(action.peer))
            return
        leg = LegId(live.request_id, action.leg)
        self._at_gate[leg] = (action.peer, time.monotonic())
        request = live.request
        tenant = request.tenant or request.cache_salt
        opened = gate.enter(leg, action.tokens, priority=request.priority, tenant=tenant, weight=request.weight)
        self._open(opened)

    def prefill_over(self, live: Live, leg: LegKey) -> None:
        """The leg occupies its prefill worker's compute no more."""
        leg_id = LegId(live.request_id, leg)
        self.placer.over("prefill", leg_id)
        peer, _ = self._at_gate.pop(leg_id, (None, 0.0))
        gate = self._gates.get(peer) if peer is not None else None
        if gate is not None:
            self._open(gate.leave(leg_id))

    def leg_over(self, live: Live, leg: LegKey) -> None:
        """The leg occupies its decode worker no more, nor waits for one."""
        leg_id = LegId(live.request_id, leg)
        self.placer.over("decode", leg_id)
        self._unplaced.pop(leg_id, None)

    def waited(self, request_id: str, leg: LegKey) -> float:
        """Seconds since the leg came to its gate."""
        _, since = self._at_gate.get(LegId(request_id, leg), (None, time.monotonic()))
        return time.monotonic() - since

    def _open(self, legs: Sequence[LegId]) -> None:
        for leg in legs:
            self._report(leg.request_id, m.LetThrough(leg.leg))

    # ---- commands --------------------------------------------------------------------------------------------------

    def send(self, live: Live, action: m.Command) -> None:
        """Sends what the action says; dropped when the worker's session is down, since it then knows no leg of ours."""
        session = self._sessions.get(action.peer)
        if session is None:
            return
        match action:
            case m.Reserve(leg, _, compute):
                command = pb.RouterCommand(reserve=pb.Reserve(leg=_leg(live, leg), compute=compute))
            case m.Prefill(leg, _, ticket):
                command = pb.RouterCommand(prefill=pb.Prefill(leg=_leg(live, leg), ticket=ticket))
            case m.HandOver(leg, _, ticket, held):
                over = pb.Handover(leg=_leg(live, leg), ticket=ticket, held=_ref(live, held))
                command = pb.RouterCommand(handover=over)
            case m.HoldChoice(leg, _, choice):
                command = pb.RouterCommand(hold=pb.Hold(leg=_ref(live, leg), choice=choice))
            case m.GivePrefix(leg, _, ticket):
                command = pb.RouterCommand(give=pb.Give(leg=_ref(live, leg), ticket=ticket))
            case m.WithdrawLeg(leg, _, error):
                gone = pb.Withdraw(leg=_ref(live, leg), code=error.code, message=error.message)
                command = pb.RouterCommand(withdraw=gone)
            case m.CancelLeg(leg):
                command = pb.RouterCommand(cancel=pb.Cancel(leg=_ref(live, leg)))
            case m.CancelChoices(leg, _, choices) | m.CancelHeld(leg, _, choices):
                command = pb.RouterCommand(cancel=pb.Cancel(leg=_ref(live, leg), choices=choices))
            case m.ReleaseLeg(leg):
                command = pb.RouterCommand(release=pb.Release(leg=_ref(live, leg)))
        session.send(command)


def _demand(live: Live, action: m.Place) -> Demand:
    leg = live.life.legs[action.leg.attempt]
    generated = len(leg.generated)
    tokens, output = len(live.request.prompt_ids) + generated, live.life.max_tokens - generated
    return Demand(tokens, output, len(leg.choices), live.request.session)


def _prefix(live: Live, action: m.Place) -> Prefix:
    generated = live.life.legs[action.leg.attempt].generated
    return Prefix(live.request.prompt_ids + generated, live.request.cache_salt)


def _leg(live: Live, key: LegKey) -> pb.Leg:
    leg = live.life.legs[key.attempt]
    return pb.Leg(
        request_id=live.request_id,
        attempt=key.attempt,
        choices=leg.choices,
        prompt_token_ids=live.request.prompt_ids,
        generated_token_ids=live.life.generated(leg),
        sampling=live.sampling,
        deadline_s=max(0.0, live.deadline - time.monotonic()),
        cache_salt=live.request.cache_salt,
    )


def _ref(live: Live, leg: LegKey) -> pb.LegRef:
    return pb.LegRef(request_id=live.request_id, attempt=leg.attempt, first_choice=leg.first_choice)


def _nobody(role: str, action: m.Place) -> BatonError:
    if action.refused is not None and role == "decode":
        return action.refused
    return Unavailable(f"no {role} worker is ready", retry_after_s=RETRY_AFTER_S)


def _late(late_s: float) -> BatonError:
    return Exhausted("no worker is predicted to keep the latency objective", retry_after_s=late_s)
