"""The router's heart: requests in, their lives driven by the workers' events and the clock, answers out.

Everything here runs on one event loop and decides nothing by itself: request_life.py says what to do, placement.py
where, gate.py when.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Sequence

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Cancelled, DeadlineExceeded, Exhausted, InternalError, Unavailable
from ..text.tokenizer import Tokenizer
from . import life_messages as m
from .dispatch import RETRY_AFTER_S, model_of
from .drain_rate import DrainRate
from .leg_table import LegState
from .life_messages import Peer
from .live import SCORES_S, Answer, Live
from .lives import Lives
from .metrics import Metrics, RouterState, WorkerState
from .moves import Moves
from .params import RouterParams
from .placement.choose import Objectives
from .placement.disaggregation import NEVER
from .placer import Placer
from .requests import ChoiceEnd, Prepared
from .sessions import Member, Session, SessionPool
from .stall import Stall
from .tenants import Tenants
from .tracing import Tracer
from .validate import ModelFacts
from .worker_events import translate

_log = logging.getLogger(__name__)


class Core:
    """Create it inside the event loop."""

    def __init__(self, params: RouterParams, tokenizer: Tokenizer, rng: random.Random, tenants: Tenants) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._facts: ModelFacts | None = None
        self._leaving = False
        self._stopping = False
        self.tenants = tenants
        self.tracer = Tracer(params.traces, params.router_id) if params.traces else None
        self._stall = Stall(params.stall_s, time.monotonic())
        self._full = Stall(params.dead_after_s, time.monotonic())
        self._heard = 0  # events of workers
        self._drained = DrainRate(time.monotonic())
        self._idle = asyncio.Event()
        self._idle.set()
        self._unscored: dict[str, Live] = {}  # ended ones whose prompt's scores are still to come
        self.metrics = Metrics(params.served_name, self.state)
        self.sessions = SessionPool(params.router_id, params.heartbeat_s, params.dead_after_s, self, params.peer_tls)
        objectives = Objectives(params.ttft_objective_s, params.tpot_objective_s)
        names = params.prefill_placement, params.decode_placement
        placer = Placer(names, objectives, params.prefix_events, rng, params.disaggregation)
        self.lives = Lives(self.sessions, placer, self, asyncio.get_running_loop().call_later)
        self.moves = Moves(self.sessions, self.lives)

    # ---- towards the frontends -------------------------------------------------------------------------------------

    def facts(self) -> ModelFacts:
        """Context and vocabulary. Raises Unavailable while no worker has ever been ready."""
        if self._facts is None:
            raise Unavailable("starting: no worker is ready yet", retry_after_s=RETRY_AFTER_S)
        return self._facts

    def not_ready(self) -> str:
        """Why no request can be served now; "" when one can."""
        if self._leaving:
            return "stopping"
        prefill, decode = self.sessions.ready("prefill"), self.sessions.ready("decode")
        alone = self._params.disaggregation == NEVER  # no prompt goes to a prefill worker
        missing = [role for role, there in (("prefill", prefill or alone), ("decode", decode)) if not there]
        if missing:
            return f"no {' and no '.join(missing)} worker is ready"
        steps = sum(session.load.steps for session in self.sessions.up())
        progress, now = (self._heard, steps), time.monotonic()
        if still_s := self._stall.seconds(progress, len(self.lives), now):
            return f"{len(self.lives)} requests are in flight, and no worker has gone on for {still_s:.0f} s"
        full = [role for role, there in (("prefill", prefill), ("decode", decode)) if there and all(map(_full, there))]
        if still_s := self._full.seconds(progress, len(full), now):
            return f"every {' and '.join(full)} pool is full, and no worker has gone on for {still_s:.0f} s"
        if not alone and not {model_of(session) for session in prefill} & {model_of(session) for session in decode}:
            return "no prefill and decode worker serve the same model"
        return ""

    def submit(self, request: Prepared) -> Answer:
        """Takes a request. Raises Exhausted when too many are in flight, Unavailable while stopping."""
        if self._stopping:
            raise Unavailable("the router is stopping", retry_after_s=RETRY_AFTER_S)
        now = time.monotonic()
        if len(self.lives) >= self._params.max_inflight:
            surplus = len(self.lives) + 1 - self._params.max_inflight
            hint_s = self._drained.hint_s(surplus, now)
            raise Exhausted(f"{len(self.lives)} requests are in flight", retry_after_s=hint_s)
        self.tenants.charge(request.tenant, _cost(request), now)
        live = Live(f"req-{uuid.uuid4().hex}", request, now, self._params.attempts, self._tokenizer)
        if self.tracer is not None:
            self.tracer.begun(live)
        self._idle.clear()
        self.metrics.accepted.inc()
        _log.info("%s accepted: %d prompt tokens, label %r", live.request_id, len(request.prompt_ids), request.label)
        error = DeadlineExceeded(f"the deadline of {request.deadline_s:.3g} s passed")
        live.timer = asyncio.get_running_loop().call_later(request.deadline_s, self.give_up, live, error)
        self.lives.begin(live)
        return Answer(live, self.give_up)

    def give_up(self, live: Live, error: BatonError) -> None:
        """Ends the request with `error`, wherever it is."""
        if live.life.outcome is None:
            if isinstance(error, Cancelled):
                self.metrics.cancellations.inc(live.phase)
            self.lives.handle(live, m.GiveUp(error))

    def leave(self) -> None:
        """Not ready from now on, so that balancers look elsewhere; requests that come nevertheless are served."""
        self._leaving = True

    async def stop(self, grace_s: float) -> None:
        """Takes no more requests, lets live ones finish for `grace_s`, then ends them with an error."""
        self._leaving = self._stopping = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            for live in self.lives:
                self.give_up(live, Unavailable("the router stopped before the request was finished"))

    def state(self) -> RouterState:
        """The gauges of this moment."""
        legs = [leg for live in self.lives for leg in live.life.legs.values()]
        known = self.lives.dispatcher.placer.index
        workers = [
            WorkerState(peer.worker_id, session.member.role, session.welcome, session.load, known.blocks(peer))
            for session in self.sessions.up()
            if session.welcome is not None and (peer := session.member.peer)
        ]
        queued = sum(live.record.first_at is None for live in self.lives)
        reserving = sum(leg.state is LegState.RESERVING for leg in legs)
        return RouterState(len(self.lives), queued, reserving, workers)

    # ---- towards the workers ---------------------------------------------------------------------------------------

    def view_changed(self, members: Sequence[Member]) -> None:
        """The membership has a new view."""
        self.sessions.update(members)
        self.lives.look_again()
        self.moves.look()

    def session_up(self, peer: Peer, welcome: pb.Welcome) -> None:
        """A worker can be used."""
        self.lives.worker_up(peer, welcome)
        ups = [session.welcome for session in self.sessions.up() if session.welcome is not None]
        self._facts = ModelFacts(min(w.max_model_len for w in ups), min(w.vocab_size for w in ups))
        _log.info("%s %s is up", peer.worker_id, peer.incarnation)
        self.moves.look()  # a draining worker may have come back

    def session_lost(self, member: Member) -> None:
        """A worker, with all that it held for us, is gone; a draining one was meant to go."""
        peer = member.peer
        level = logging.WARNING if member.state == "ready" else logging.INFO
        _log.log(level, "%s %s is lost", peer.worker_id, peer.incarnation)
        self.lives.worker_lost(peer)

    def session_event(self, peer: Peer, event: pb.WorkerEvent) -> None:
        """A worker said something about a leg; what concerns requests that are over is late news."""
        self._heard += 1
        now = time.monotonic()
        match event.WhichOneof("event"):
            case "tokens":
                others = self._go_on(peer, event.tokens, now)
                if not others:
                    return
                event = pb.WorkerEvent(tokens=pb.Tokens(tokens=others, at=event.tokens.at))
            case "prefixes":
                self.lives.dispatcher.prefixes_changed(peer, event.prefixes)
            case "prompt_scores":
                name = event.prompt_scores.leg.request_id
                live = self.lives.get(name) or self._unscored.get(name)
                if live is not None:
                    live.scored(event.prompt_scores)
        clock = self._clock(peer)
        for request_id, life_event in translate(peer, event):
            live = self.lives.get(request_id)
            if live is None:
                self.lives.late(request_id, life_event)
                continue
            if isinstance(life_event, m.Tokens):
                if live.record.second_awaited:
                    live.record.stepped(life_event.attempt, life_event.tokens, event.tokens.at, now, clock)
            elif live.life.follows(life_event.leg):
                self._measure(live, event, clock)
            self.lives.handle(live, life_event)
            if isinstance(life_event, m.Tokens) and live.record.under_way:
                self.lives.flow(live, life_event.attempt, peer, self)

    def _go_on(self, peer: Peer, tokens: pb.Tokens, now: float) -> list[pb.StepToken]:
        """Takes the tokens of a step that merely continue their choices, nearly all of them; returns the others."""
        others: list[pb.StepToken] = []
        flows = self.lives.flows
        for step in tokens.tokens:
            flow = flows.get(step.request_id)
            if flow is None or not flow.take(peer, step, now):
                others.append(step)
        return others

    def _clock(self, peer: Peer) -> str:
        """The name of the worker's clock; empty: unknown."""
        session = self.sessions.get(peer)
        return session.welcome.clock if session is not None and session.welcome is not None else ""

    def _measure(self, live: Live, event: pb.WorkerEvent, clock: str) -> None:
        """Notes what an event of a live leg says about its phases. clock: of the worker that says it."""
        metrics, record = self.metrics, live.record
        match event.WhichOneof("event"):
            case "ticket":
                record.ticket(event.ticket)
                metrics.alloc_wait.observe(event.ticket.waited_s)
            case "first":
                metrics.recomputed_tokens.inc(by=live.recomputed(event.first))
                record.prefilled(event.first, time.monotonic(), clock)
                metrics.prefilled_on_decode.inc(by=_computed_here(live, event.first.leg))
            case "sent":
                record.sent(event.sent)
                self.lives.dispatcher.sent(live, event.sent)
                metrics.transfer_seconds.observe(event.sent.transfer_s)
                metrics.transfer_bytes.observe(event.sent.bytes)
                leg = live.life.legs.get(event.sent.leg.attempt)
                if leg is not None and leg.prefill is not None and leg.decode is not None:
                    metrics.link_bytes.inc(leg.prefill.worker_id, leg.decode.worker_id, by=event.sent.bytes)
            case "committed":
                record.committed(event.committed, time.monotonic(), clock)
                if not _computed_here(live, event.committed.leg):
                    metrics.transfers.inc("ok")
            case "preempted":
                metrics.preemptions.inc()
            case "unsent":
                metrics.transfers.inc("failed")
                _log.info("%s: not sent: %s: %s", live.request_id, event.unsent.code, event.unsent.message)
            case "failed":
                if event.failed.code == "transfer_failed":
                    metrics.transfers.inc("failed")
                _log.info("%s: %s: %s", live.request_id, event.failed.code, event.failed.message)

    # ---- what becomes of the requests ------------------------------------------------------------------------------

    def placing(self, live: Live, action: m.Place) -> None:
        """Counts retries and migrations."""
        leg = live.life.legs[action.leg.attempt]
        begun = bool(live.life.ledgers[leg.choices[0]].token_ids)
        if action.cause == "retry":
            self.metrics.retries.inc("resumed" if begun else "first")
        if action.source is not None:
            self.metrics.handovers.inc(action.cause)
        if action.cause in ("retry", "preempted", "moved"):
            self.metrics.migrations.inc("ongoing" if begun else "new")

    def emitted(self, live: Live, tokens: Sequence[pb.Token]) -> None:
        """Makes text of tokens, and gives it to the client."""
        record, metrics = live.record, self.metrics
        had_first, had_second = record.first_at is not None, record.second_gap is not None
        try:
            chunks, ended = live.output.push(tokens)
        except Exception:
            self.textless(live)
            return
        now = time.monotonic()
        for chunk in chunks:
            metrics.gaps.observe(record.emitted(chunk, now), len(chunk.token_ids))
            live.mailbox.put(chunk)
        if not had_first and record.first_at is not None:
            metrics.first_token(record.first_at - record.received, record.queue_s, record.prefill_s)
            metrics.prompt_tokens.inc(by=record.prompt_tokens)
            metrics.cached_tokens.inc(by=record.prefill_cached or 0)
        if not had_second and record.second_gap is not None:
            metrics.second_token.observe(record.second_gap)
        for choice in ended:
            self._choice_ended(live, choice, last=choice == ended[-1] and live.output.open_choices == 0)

    def textless(self, live: Live) -> None:
        """Ends a request over a fault in its text, which is being handled."""
        _log.exception("%s: the text of its tokens could not be made", live.request_id)
        self.lives.handle(live, m.GiveUp(InternalError("the answer's text could not be made")))

    def _choice_ended(self, live: Live, choice: int, *, last: bool) -> None:
        reason, matched = live.output.reason(choice)
        self.metrics.finished.inc(reason)
        usage = timing = None
        if last:
            usage = live.record.usage(live.output.completion_tokens)
            timing = live.record.timing(time.monotonic(), 1 + live.life.retries, live.life.preemptions)
        live.mailbox.put(ChoiceEnd(choice, reason, matched, usage, timing))
        self.lives.handle(live, m.StopMatched(choice))  # changes nothing when the worker ended the choice

    def ended(self, live: Live, error: BatonError | None) -> None:
        """Closes the answer; the story of a request that ended badly goes to the log."""
        if live.timer is not None:
            live.timer.cancel()
        record, now = live.record, time.monotonic()
        self._drained.ended(now)
        unused = live.request.sampling.max_tokens * live.request.sampling.n - live.output.completion_tokens
        self.tenants.give_back(live.request.tenant, unused, now)
        if error is None:
            self.metrics.completion(record, live.output.completion_tokens, live.output.longest, now)
        elif isinstance(error, Cancelled):
            self.metrics.cancelled.inc()
        else:
            self.metrics.failed.inc(error.code)
        if error is None and live.request.sampling.prompt_logprobs is not None and not live.all_scored.is_set():
            self._unscored[live.request_id] = live
            asyncio.get_running_loop().call_later(SCORES_S, self._unscored.pop, live.request_id, None)
        live.mailbox.close(error)
        if self.tracer is not None:
            self.tracer.ended(live, now, error)
        _log.info(
            "%s %s after %.3f s: %d tokens, P %s, D %s, %d KV bytes%s",
            live.request_id,
            error.code if error else "completed",
            now - record.received,
            live.output.completion_tokens,
            record.prefill_worker,
            record.decode_worker or "-",
            record.kv_bytes,
            f": {error}" if error else "",
        )
        story = self.lives.stories.find(live.request_id)
        if isinstance(error, InternalError | DeadlineExceeded) and story is not None:
            _log.warning("the story of a request that failed (%s):\n%s", error.code, story)
        if not len(self.lives):
            self._idle.set()


def _computed_here(live: Live, ref: pb.LegRef) -> bool:
    """Whether the leg's decode worker computes its prompt."""
    leg = live.life.legs.get(ref.attempt)
    return leg is not None and leg.prefill is None


def _full(session: Session) -> bool:
    """Whether the worker has no block to give away, and runs nothing that would free one."""
    load = session.load
    return 0 < load.total_blocks <= load.used_blocks and not load.running


def _cost(request: Prepared) -> int:
    """Tokens that a request may come to, for its tenant's rate."""
    return len(request.prompt_ids) + request.sampling.max_tokens * request.sampling.n
