"""The simulated cluster: router, controller and workers, wires between them, and what a client sees of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from baton.proto import worker_pb2 as pb
from baton.proto.block_digests import short_digest
from baton.proto.errors import BatonError, Cancelled, DeadlineExceeded, Exhausted, TransferFailed, Unavailable
from baton.router import life_messages as m
from baton.router.life_messages import Peer
from baton.router.live import Live
from baton.router.lives import Lives
from baton.router.placement.choose import Objectives
from baton.router.placer import Placer
from baton.router.requests import Prepared
from baton.router.sessions import Member
from baton.router.worker_events import translate
from baton.tests.harness.monolithic import sampling

from .language import STOP, Book, answer
from .receive_link import ReceiveLink
from .scenario import Ask, Scenario
from .send_link import FRAME_S, SendLink
from .sessions import DEAD_AFTER_S, Sessions
from .worker import Process
from .world import Violation, Wire, World

START_S = 1.0  # until the first request
_ATTEMPTS = 3
_NO_TEXT = SimpleNamespace(special_ids=frozenset())  # in place of a tokenizer: nothing here becomes text
_FAILURES = (Unavailable, TransferFailed, Exhausted)


@dataclass(slots=True)
class Client:
    """What the client of one request has got."""

    ask: Ask
    said: list[list[int]]
    due: list[list[int]]
    live: Live | None = None
    cancelled: bool = False
    ends: list[BatonError | None] = field(default_factory=list)
    arrived: float = 0.0


class Cluster:
    """Everything at once. `wires`: (wire, worker, "") of sessions, (wire, who dialled, who answered) of links."""

    def __init__(self, scenario: Scenario) -> None:
        self.world = World(scenario.luck, scenario.rates)
        self.book = Book()
        self.specs = dict(scenario.workers)
        self.processes: dict[str, Process] = {}  # the latest incarnations
        self.history: dict[Peer, Process] = {}
        self.wires: list[tuple[Wire, str, str]] = []
        self.sessions = Sessions(self)
        policy = "prefix_aware" if scenario.seed % 2 else "least_loaded"
        here = scenario.seed // 3 % 4 == 3  # decode workers compute some prompts, and without prefill all
        disaggregation = "conditional" if here else "always"
        placer = Placer((policy, policy), Objectives(None, None), True, self.world.rng, disaggregation)
        if here:
            placer.on_decode = lambda *_: self.world.rng.random() < 0.5
        self.lives = Lives(cast(Any, self.sessions), placer, self, self.world.at)
        self.clients = {ask.request_id: self._client(ask) for ask in scenario.asks}
        self.faulty = bool(scenario.faults)
        self.last_end = 0.0
        self._versions = 0
        self._incarnations = 0
        for worker_id in self.specs:
            self.start(worker_id)
        for client in self.clients.values():
            self.world.at(START_S + client.ask.at, self._arrive, client)

    def _client(self, ask: Ask) -> Client:
        answers = [answer(ask.prompt, choice, ask.max_tokens, ask.salt) for choice in range(ask.n)]
        for choice, right in enumerate(answers):
            self.book.answers[ask.request_id, choice] = right
        due = [right.output for right in answers]
        if ask.stop_at:
            due[0] = due[0][: ask.stop_at]
        return Client(ask, [[] for _ in answers], due)

    # ---- controller ------------------------------------------------------------------------------------------------

    def start(self, worker_id: str) -> None:
        """A new incarnation, behind the same address."""
        self._incarnations += 1
        process = Process(self, worker_id, f"i{self._incarnations}", self.specs[worker_id])
        self.processes[worker_id] = self.history[Peer(worker_id, process.incarnation)] = process
        self.world.disturbed = self.world.now
        self.view(self.world.rng.random() * 0.02)

    def view(self, delay: float) -> None:
        """The router hears who is there, a while from now."""
        self._versions += 1
        members = [
            Member(Peer(p.worker_id, p.incarnation), p.spec.role, p.worker_id, p.state)
            for p in self.processes.values()
            if p.alive
        ]
        self.world.at(delay, self.sessions.update, self._versions, members)

    def dial_link(self, link: SendLink, address: str) -> Wire | None:
        """A prefill rank connects to a decode rank; None: nobody is there."""
        worker_id, _, rank = address.partition(":")
        process = self.processes.get(worker_id)
        if process is None or not process.alive:
            return None
        end = ReceiveLink(process.receivers[int(rank)])
        end.wire = wire = Wire(self.world, (link, end), FRAME_S, lambda message: f"link.{message[0]}")
        self.wires.append((wire, link.worker_id, worker_id))
        self.hold_if_stalled(process, wire, 1)
        return wire

    def hold_if_stalled(self, process: Process, wire: Wire, end: int) -> None:
        """A stopped process answers nobody."""
        if (left := process.stalled_until - self.world.now) > 0:
            wire.hold(end, left)
            wire.mute(1 - end, left)

    def check_alive(self, peer: Peer) -> None:
        """I10: nothing is sent to a dead worker after the detection bound."""
        process = self.history[peer]
        if not process.alive and self.world.now > process.died_at + DEAD_AFTER_S + 0.1:
            raise Violation(f"I10: something is sent to {peer}, which is dead")

    # ---- router ----------------------------------------------------------------------------------------------------

    def _arrive(self, client: Client) -> None:
        ask, now = client.ask, self.world.now
        stops = frozenset({STOP})
        prepared = Prepared(
            prompt_ids=list(ask.prompt),
            sampling=sampling(n=ask.n, max_tokens=ask.max_tokens, stop_token_ids=stops),
            stops=(),
            include_stop=False,
            label="",
            cache_salt=ask.salt,
            tenant="",
            weight=1.0,
            session="",
            priority=ask.number % 2,
            deadline_s=ask.deadline_s,
            stream_interval=1,
        )
        client.arrived = self.world.disturbed = now
        client.live = Live(ask.request_id, prepared, now, _ATTEMPTS, cast(Any, _NO_TEXT))
        self.world.at(ask.deadline_s, self.give_up, client, DeadlineExceeded("the deadline passed"))
        self.lives.begin(client.live)
        if client.cancelled:
            self.give_up(client, Cancelled("the client left"))

    def give_up(self, client: Client, error: BatonError) -> None:
        """The request must end."""
        if client.live is not None and client.live.life.outcome is None:
            self.lives.handle(client.live, m.GiveUp(error))

    def heard(self, peer: Peer, event: pb.WorkerEvent) -> None:
        """As `Core.session_event`."""
        if event.HasField("prefixes"):
            self.lives.dispatcher.prefixes_changed(peer, event.prefixes)
        for request_id, news in translate(peer, event):
            live = self.lives.get(request_id)
            if live is None:
                self.lives.late(request_id, news)
            else:
                self.lives.handle(live, news)

    def placing(self, live: Live, action: m.Place) -> None:
        """Nothing to count."""

    def emitted(self, live: Live, tokens: Sequence[pb.Token]) -> None:
        """I2: each token once, in order, and the right one. As RequestOutput, it drops what follows a stop."""
        client = self.clients[live.request_id]
        stop_at = client.ask.stop_at
        for token in tokens:
            said, due = client.said[token.choice], client.due[token.choice]
            if stop_at and token.choice == 0 and len(said) == stop_at:
                continue
            if token.index != len(said) or len(said) >= len(due) or token.token_id != due[len(said)]:
                what = f"token {token.index}, {token.token_id}, of choice {token.choice}"
                raise Violation(f"I2: {live.request_id} says {what} after {said}")
            said.append(token.token_id)
            if token.finish_reason or said == due:
                self.lives.handle(live, m.StopMatched(token.choice))

    def ended(self, live: Live, error: BatonError | None) -> None:
        """I1, I12: once, for a good reason, with everything or an error."""
        client = self.clients[live.request_id]
        client.ends.append(error)
        self.last_end = self.world.now
        if len(client.ends) > 1:
            raise Violation(f"I1: {live.request_id} ended twice: {client.ends}")
        counted = [ledger.token_ids for ledger in live.life.ledgers]
        if client.ask.stop_at:
            counted[0] = counted[0][: len(client.said[0])]
        if counted != client.said:
            raise Violation(f"I12: {live.request_id} counts {counted}, the client got {client.said}")
        if error is None and client.said != client.due:
            raise Violation(f"I1: {live.request_id} is complete with {client.said}, not {client.due}")
        late = self.world.now >= client.arrived + client.ask.deadline_s - 0.01
        allowed: bool = (
            error is None
            or (isinstance(error, _FAILURES) and self.faulty)
            or (isinstance(error, DeadlineExceeded) and late)
            or (isinstance(error, Cancelled) and client.cancelled)
        )
        if not allowed:
            raise Violation(f"{live.request_id} ended with {error!r}")

    def leave_waiting(self) -> bool:
        """Clients whose requests wait for a worker, although none comes any more, leave. Whether there were any.

        A leg that waits although there are workers breaks I1.
        """
        waiting = {leg.request_id for leg in self.lives.dispatcher._unplaced}
        if waiting and self.sessions.ready("prefill") and self.sessions.ready("decode"):
            raise Violation(f"I1: {waiting} wait for workers, and there are some")
        for request_id in waiting:
            self.clients[request_id].cancelled = True
            self.give_up(self.clients[request_id], Cancelled("nobody comes"))
        return bool(waiting)

    # ---- rest ------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return all(client.ends for client in self.clients.values())

    def problem(self) -> str:
        """Why the cluster is not at rest; empty when it is (I3, I5, I11)."""
        running = [client.ask.request_id for client in self.clients.values() if not client.ends]
        if running:
            return f"I1: {running} have not ended"
        dispatcher = self.lives.dispatcher
        loads = [load._peers for load in dispatcher.placer._loads.values()]
        gates = [leg for gate in dispatcher._gates.values() for leg in (*gate._waiting, *gate._through)]
        waiting = [*dispatcher._at_gate, *dispatcher._unplaced]
        if any(loads) or gates or waiting or len(self.lives):
            return f"the router still counts {loads}, {gates}, {waiting}"
        alive = [process for process in self.processes.values() if process.alive]
        return next((found for p in alive if (found := p.problem() or self._misbelief(p))), "")

    def _misbelief(self, process: Process) -> str:
        """Where the router knows other prefixes of a worker than those that it holds; empty when it does not."""
        placer, peer = self.lives.dispatcher.placer, Peer(process.worker_id, process.incarnation)
        session = self.sessions.get(peer)
        if session is None or session.welcome is None or not placer.watches(process.spec.role):
            return ""
        _, known = placer.index._workers[peer]
        held = process.pool.prefixes
        if len(known) == len(held) and all(short_digest(digest) in known for digest in held):
            return ""
        return f"the router knows {len(known)} blocks of {process.worker_id}, which holds {len(held)}"
