"""One incarnation of a simulated worker: the product's engine, books and sender on simulated wires and time."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from baton.decode_worker import main as decode_main
from baton.decode_worker.intake import Intake
from baton.decode_worker.legs import DecodeLegs
from baton.decode_worker.prompts import Prompts
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.worker import DecodeEngine
from baton.engine.block_pool import BlockPool
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.proposal_length import Costs
from baton.engine.speculation import Speculator
from baton.kv_transfer.events import LegKey
from baton.kv_transfer.params import TransferParams
from baton.kv_transfer.plan import Box
from baton.kv_transfer.send_leg import LegPart
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import Ticket, TicketBook
from baton.prefill_worker import main as prefill_main
from baton.prefill_worker.entry import Phase
from baton.prefill_worker.legs import PrefillLegs, Rules
from baton.prefill_worker.worker import PrefillEngine
from baton.proto import worker_pb2 as pb
from baton.proto.worker_loop import SessionEnded

from .crew import Crew, Inbox, Session, Spec
from .language import VOCABULARY, Guesses, Runner, Store
from .receive_link import Receiver
from .send_link import FRAME_BYTES, FRAME_S, WINDOW
from .world import Violation

if TYPE_CHECKING:
    from .cluster import Cluster

RESERVE_WAIT_S = 8.0
COMMIT_S = 6.0
STEP_S = 0.01
TRANSFER = TransferParams(
    host="127.0.0.1",
    connect_timeout_s=2.0,
    frame_timeout_s=FRAME_S,
    idle_close_s=30.0,
    transport="inline",
    wire="raw",
    tls=None,
    max_links=64,
    checksum=True,
    max_outstanding=WINDOW,
    frame_bytes=FRAME_BYTES,
)


class _Sender(Sender):
    """The product's, which can say whose it is."""

    process: Process


class Process:
    """A worker from its start to its death."""

    def __init__(self, cluster: Cluster, worker_id: str, incarnation: str, spec: Spec) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.spec = spec
        self.layout = spec.layout
        self.alive = True
        self.state = "ready"  # or "draining"
        self.died_at = 0.0
        self.slow = 1.0
        self.stalled_until = 0.0
        self.corrupt_next = self.break_next = 0
        self.tickets = TicketBook(b"secret of sixteen", lambda: self.world.now)
        self.inbox = Inbox(self.poke)
        self.pool = BlockPool(spec.blocks, spec.block_size, spec.prefix_cache)
        self.stores = [Store(spec.blocks, spec.block_size, high - low) for low, high in self.layout.head_ranges]
        self.senders: list[_Sender] = []
        self.receivers: list[Receiver] = []
        self._sessions: dict[int, Session] = {}
        self._session_number = 0
        self._running = self._poked = False
        self._wakes_at = float("inf")
        self._start()
        self.welcome = pb.Welcome(
            worker_id=worker_id,
            incarnation=incarnation,
            role=spec.role,
            model_fingerprint="model",
            max_model_len=10_000,
            vocab_size=VOCABULARY,
            block_size=spec.block_size,
            total_blocks=spec.blocks,
            max_batch_tokens=spec.batch,
            max_sequences=spec.batch,
            lookahead=spec.lookahead,
        )

    def _start(self) -> None:
        """The engine of the role, with both ends of the transfer on every rank."""
        main = prefill_main if self.spec.role == "prefill" else decode_main
        crew = Crew(self, lambda message, rank: main._obey(message, followers[rank - 1], self._ends(rank)))
        followers, runner = self._runners(crew)
        tell = [self.inbox.put] + [
            lambda event, rank=rank: main._tell_leader(crew.report(rank), event) for rank in range(1, self.spec.ranks)
        ]
        for rank, store in enumerate(self.stores):
            self.senders.append(_Sender(TRANSFER, cast(Any, store), self.layout, rank, tell[rank]))
            self.senders[rank].process = self
            self.receivers.append(Receiver(self, rank, store, tell[rank]))
        outwards = cast(Any, self.senders[0]), cast(Any, self.receivers[0]), cast(Any, crew if followers else None)
        inbox, seats = cast(Any, self.inbox), self.spec.batch
        self.legs: PrefillLegs | DecodeLegs
        self.engine: PrefillEngine | DecodeEngine
        if self.spec.role == "prefill":
            rules = Rules(COMMIT_S, self.spec.fetch_tokens, fetch_s=1.0)
            book = self.legs = PrefillLegs(self.pool, PrefillScheduler(seats), self.spec.ranks, rules)
            self.engine = PrefillEngine(runner, *outwards, self._issue, book, inbox)
        else:
            intake = Intake(self.pool, self.spec.ranks, seats, RESERVE_WAIT_S, COMMIT_S)
            scheduler = DecodeScheduler(self.spec.block_size)
            prompts = Prompts(self.pool, PrefillScheduler(seats))
            legs = self.legs = DecodeLegs(self.pool, intake, scheduler, prompts, seats, max_model_len=10_000)
            guesses, free = Guesses(self.cluster.book, self.world.rng), Costs(0.0, 0.0, 0.0)
            speculator = Speculator(guesses, free, self.spec.proposals, self.spec.block_size)
            told = speculator if self.spec.proposals else None
            self.engine = DecodeEngine(runner, *outwards, self._issue, legs, inbox, told)

    def _ends(self, rank: int) -> Any:
        return SimpleNamespace(sender=self.senders[rank], receiver=self.receivers[rank])

    def _runners(self, crew: Crew) -> tuple[list[Any], Any]:
        book, layout = self.cluster.book, self.layout
        followers = [Runner(book, [store], layout, None) for store in self.stores[1:]]
        return followers, Runner(book, self.stores, layout, crew)

    def _issue(self, leg: LegKey, cached: int, tokens: int) -> Ticket:
        return self.tickets.issue(
            leg,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=self.layout,
            addresses=tuple(f"{self.worker_id}:{rank}" for rank in range(self.spec.ranks)),
            cached_tokens=cached,
            prompt_tokens=tokens,
            carrier="inline",
            lifetime_s=COMMIT_S,
        )

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def pause(self) -> float:
        """Until a thread of this worker gets to something."""
        return self.world.rng.random() * 0.001 * self.slow + max(0.0, self.stalled_until - self.world.now)

    def poke(self) -> None:
        """There is something to do."""
        if not self._poked and not self._running:
            self._poked = True
            self.world.at(self.pause(), self._turn)

    def _turn(self) -> None:
        self._poked = False
        if not self.alive or self._running:
            return
        self._drain()
        if self.engine.schedule():
            self._running = True
            self.world.at(STEP_S * (0.5 + self.world.rng.random()) * self.slow, self._ran)
        elif (wake := self.engine.wake_in()) is not None and self.world.now + wake < self._wakes_at:
            self._wakes_at = self.world.now + wake
            self.world.at(wake + 1e-6, self._wake)
        self._after()

    def _wake(self) -> None:
        self._wakes_at = float("inf")
        self.poke()

    def _drain(self) -> None:
        while True:
            try:
                item = self.inbox.get_nowait()
            except queue.Empty:
                return
            self.engine.handle(item)
            if isinstance(item, SessionEnded):
                self._check_dropped(item.session)

    def _ran(self) -> None:
        if not self.alive:
            return
        if self.stalled_until > self.world.now:
            self.world.at(self.stalled_until - self.world.now, self._ran)
            return
        if self.world.on_mark is not None:
            self.world.on_mark(f"{self.spec.role}.step")
        if self.died_at:  # of that
            return
        self.engine.run()
        self._running = False
        self._after()
        self.poke()

    def _after(self) -> None:
        for number, events in self.engine.take_events().items():
            session = self._sessions.get(number)
            if session is not None and session.wire is not None:
                for event in events:
                    session.wire.send(0, event)
        self.check()

    # ---- sessions and wires ----------------------------------------------------------------------------------------

    def begin_session(self) -> Session:
        """A router said hello."""
        self._session_number += 1
        session = self._sessions[self._session_number] = Session(self, self._session_number)
        return session

    def end_session(self, number: int) -> None:
        """Its legs are dropped."""
        if self._sessions.pop(number, None) is not None:
            self.inbox.put(SessionEnded(number))

    def corrupted(self, payload: list[list[int]]) -> list[list[int]]:
        """The payload as it leaves: with a flipped bit, if one is due."""
        if not self.corrupt_next:
            return payload
        self.corrupt_next -= 1
        return [[payload[0][0] ^ 1, *payload[0][1:]], *payload[1:]]

    def carrier_breaks(self) -> bool:
        """Whether the carrier fails with this payload."""
        if not self.break_next:
            return False
        self.break_next -= 1
        return True

    # ---- what must hold --------------------------------------------------------------------------------------------

    def gather(self, sender: Any, part: LegPart, box: Box) -> list[list[int]]:
        """A frame's cells; raises Violation when they are not the leg's, or its blocks are nobody's."""
        first, size = self.layout.head_ranges[sender.rank][0], self.spec.block_size
        store: Store = self.stores[sender.rank]
        key = part.leg.key
        for number in range(box.tokens[0] // size, -(-box.tokens[1] // size)):
            if sender.rank:
                break  # a follower hears of an end a moment after rank 0; until then nobody writes to its blocks
            if not self.pool.references(part.leg.blocks[number]):
                raise Violation(f"I5: {key} is sent from block {part.leg.blocks[number]}, which is free")
        heads = (box.heads[0] - first, box.heads[1] - first)
        cells = store.gather(part.leg.blocks, box.layers, heads, box.tokens)
        right = self.cluster.book.answers[key[0], key[2]].origins[slice(*box.tokens)]
        if any(row != right for row in cells):
            raise Violation(f"I4: {key} is sent from blocks that hold something else")
        return cells

    def check_place(self, receiver: Receiver, key: LegKey, blocks: Sequence[int], box: Box) -> None:
        """Raises Violation when a frame is about to be written to what is not its reservation's."""
        if receiver.rank:
            return  # a follower hears of an end a moment after rank 0
        own: list[int] = []
        if isinstance(self.legs, DecodeLegs):
            if (reservation := self.legs.intake.reserved.get(key)) is not None:
                own = reservation.blocks[: len(blocks)]
        elif (entry := self.legs._legs.get(key)) is not None and entry.phase is Phase.FETCHING:
            own = entry.blocks
        if own != list(blocks):
            raise Violation(f"I4: a late frame of {key} is written to blocks that are not its own")

    def check(self) -> None:
        """After each turn of the engine."""
        self.pool.check()
        if isinstance(self.legs, DecodeLegs):
            intake = self.legs.intake
            if len(self.legs.scheduler) + intake.reserved_sequences > self.spec.batch:
                raise Violation(f"I6: more than {self.spec.batch} sequences at {self.worker_id}")

    def _check_dropped(self, session: int) -> None:
        legs: Any = self.legs
        owners = (
            legs._owners().values()
            if isinstance(legs, DecodeLegs)
            else [entry.session for entry in legs._legs.values()]
        )
        if session in owners:
            raise Violation(f"I5: {self.worker_id} holds legs of session {session}, which has ended")

    def problem(self) -> str:
        """Why the worker is not at rest; empty when it is."""
        load = self.legs.load()
        kept = (load.running, load.waiting, load.held_legs, load.used_blocks)
        if any(kept):
            return f"{self.worker_id} keeps (running, waiting, held, blocks) = {kept}: {self.legs!r}"
        sending = [key for sender in self.senders for key in sender._legs]
        expected = [key for receiver in self.receivers for key in receiver.legs]
        if sending or expected:
            return f"{self.worker_id} still sends {sending} and expects {expected}"
        return ""
