"""Legs to workers: chooses them, holds legs back at the lookahead gates, and sends the commands."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Unavailable
from . import life_messages as m
from .gate import LookaheadGate
from .life_messages import LegKey, Peer
from .live import Live
from .placement import Candidate, LegId, Outstanding, Policy, Room, pick
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


class Dispatcher:
    """What it finds out is reported through `report` as an event of the request's life."""

    def __init__(
        self,
        sessions: SessionPool,
        prefill_policy: Policy,
        decode_policy: Policy,
        rng: random.Random,
        report: Callable[[str, m.Event], None],
    ) -> None:
        self._sessions = sessions
        self._policies = {"prefill": prefill_policy, "decode": decode_policy}
        self._loads = {"prefill": Outstanding(), "decode": Outstanding()}
        self._rng = rng
        self._report = report
        self._gates: dict[Peer, LookaheadGate] = {}
        self._at_gate: dict[LegId, tuple[Peer, float]] = {}
        self._unplaced: dict[LegId, tuple[Live, m.Place]] = {}  # legs that wait until a worker is ready

    # ---- workers come and go ---------------------------------------------------------------------------------------

    def worker_up(self, peer: Peer, welcome: pb.Welcome) -> None:
        """A session with a worker began."""
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

    # ---- placing ---------------------------------------------------------------------------------------------------

    def place(self, live: Live, action: m.Place) -> None:
        """Chooses the workers of a leg; reports Placed or Unplaceable, or waits with that until a worker comes."""
        if action.source is not None:
            self._place_beside(live, action, action.source)
            return
        prefill = self._pick("prefill", action, None)
        decode = self._pick("decode", action, model_of(prefill)) if prefill and action.needs_decode else None
        if prefill is None or (action.needs_decode and decode is None):
            error = _nobody("decode" if prefill else "prefill", action)
            if action.patient and error is not action.refused:
                self._unplaced[LegId(live.request_id, action.leg)] = live, action
            else:
                self._report(live.request_id, m.Unplaceable(action.leg, error))
            return
        leg = live.life.legs[action.leg.attempt]
        leg_id = LegId(live.request_id, action.leg)
        generated = len(live.life.generated(leg))
        held = len(live.request.prompt_ids) + generated
        self._loads["prefill"].add(leg_id, prefill.member.peer, held)
        if decode is not None:
            left = (live.life.max_tokens - generated) * len(leg.choices)
            self._loads["decode"].add(leg_id, decode.member.peer, held + left)
        live.record.placed(prefill.member.peer.worker_id, decode.member.peer.worker_id if decode else "")
        decode_peer = decode.member.peer if decode else None
        self._report(live.request_id, m.Placed(action.leg, prefill.member.peer, decode_peer))

    def _place_beside(self, live: Live, action: m.Place, source: Peer) -> None:
        """Another decode worker for KV that `source` has; one with room for it now, where there is one."""
        leg = live.life.legs[action.leg.attempt]
        most = len(live.request.prompt_ids) + live.life.max_tokens
        session = self._sessions.get(source)
        model = model_of(session) if session is not None else ""
        others = [s for s in self._sessions.ready("decode") if model_of(s) == model and s.member.peer != source]
        roomy = [s for s in others if room(s).fits(most) and s.member.peer not in action.avoid]
        decode = self._choose("decode", roomy or others, action)
        if decode is None:
            self._report(live.request_id, m.Unplaceable(action.leg, _nobody("decode", action)))
            return
        held = len(live.request.prompt_ids) + len(leg.generated)
        left = (live.life.max_tokens - len(leg.generated)) * len(leg.choices)
        self._loads["decode"].add(LegId(live.request_id, action.leg), decode.member.peer, held + left)
        live.record.moved(decode.member.peer.worker_id)
        self._report(live.request_id, m.Placed(action.leg, source, decode.member.peer))

    def _pick(self, role: str, action: m.Place, model: str | None) -> Session | None:
        sessions = [s for s in self._sessions.ready(role) if model is None or model_of(s) == model]
        return self._choose(role, sessions, action)

    def _choose(self, role: str, sessions: Sequence[Session], action: m.Place) -> Session | None:
        peers = [session.member.peer for session in sessions]
        peer = pick(
            self._policies[role],
            [Candidate(peer, self._loads[role].of(peer)) for peer in peers],
            self._rng,
            prefer=action.prefer if role == "prefill" else None,
            avoid=action.avoid,
            may_use_avoided=action.refused is None or role == "prefill",
        )
        return None if peer is None else self._sessions.get(peer)

    # ---- the lookahead ---------------------------------------------------------------------------------------------

    def enter_gate(self, live: Live, action: m.EnterGate) -> None:
        """Holds the leg back until its prefill worker is about to run it; reports LetThrough then."""
        gate = self._gates.get(action.peer)
        if gate is None:
            self._report(live.request_id, m.WorkerLost(action.peer))
            return
        leg = LegId(live.request_id, action.leg)
        self._at_gate[leg] = (action.peer, time.monotonic())
        self._open(gate.enter(leg, action.tokens))

    def prefill_over(self, live: Live, leg: LegKey) -> None:
        """The leg occupies its prefill worker's compute no more."""
        leg_id = LegId(live.request_id, leg)
        self._loads["prefill"].remove(leg_id)
        peer, _ = self._at_gate.pop(leg_id, (None, 0.0))
        gate = self._gates.get(peer) if peer is not None else None
        if gate is not None:
            self._open(gate.leave(leg_id))

    def leg_over(self, live: Live, leg: LegKey) -> None:
        """The leg occupies its decode worker no more, nor waits for one."""
        leg_id = LegId(live.request_id, leg)
        self._loads["decode"].remove(leg_id)
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
            case m.Reserve(leg):
                command = pb.RouterCommand(reserve=pb.Reserve(leg=_leg(live, leg)))
            case m.Prefill(leg, _, ticket):
                command = pb.RouterCommand(prefill=pb.Prefill(leg=_leg(live, leg), ticket=ticket))
            case m.HandOver(leg, _, ticket, held):
                over = pb.Handover(leg=_leg(live, leg), ticket=ticket, held=_ref(live, held))
                command = pb.RouterCommand(handover=over)
            case m.HoldChoice(leg, _, choice):
                command = pb.RouterCommand(hold=pb.Hold(leg=_ref(live, leg), choice=choice))
            case m.GivePrefix(leg, _, ticket):
                command = pb.RouterCommand(give=pb.Give(leg=_ref(live, leg), ticket=ticket))
            case m.CancelLeg(leg):
                command = pb.RouterCommand(cancel=pb.Cancel(leg=_ref(live, leg)))
            case m.CancelChoices(leg, _, choices) | m.CancelHeld(leg, _, choices):
                command = pb.RouterCommand(cancel=pb.Cancel(leg=_ref(live, leg), choices=choices))
            case m.ReleaseLeg(leg):
                command = pb.RouterCommand(release=pb.Release(leg=_ref(live, leg)))
        session.send(command)


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
