"""A prefill rank's end: takes what the engine computed, and has its links push it to the decode ranks that need it.

No method blocks on the network; each only changes state under one lock and wakes a link's thread. The pool's blocks
are the queue: `computed` notes ranges, and a link gathers them when it is their turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..proto.errors import BatonError, Incompatible, InternalError, TransferFailed
from ..proto.kv_layout import KVLayout, block_count
from .block_store import BlockStore
from .compat import differences
from .events import LegKey, SendEvent, SendFailed, Sent
from .handoff import SendLeg
from .params import TransferParams
from .plan import length, shares
from .send_leg import LegPart, SendingLeg
from .send_link import SendLink
from .ticket import Ticket

_Notice = tuple[SendLink, LegPart]


class Sender:
    """One per prefill rank. Thread-safe.

    `on_event` gets exactly one SendEvent for each opened leg, and none for a leg after `cancel` or `abandon` returned,
    except one that was already being delivered. Raises ValueError for a rank that the layout lacks.
    """

    def __init__(
        self,
        params: TransferParams,
        store: BlockStore,
        layout: KVLayout,
        rank: int,
        on_event: Callable[[SendEvent], None],
    ) -> None:
        if not 0 <= rank < layout.tensor_parallel:
            raise ValueError(f"rank {rank} of {layout.tensor_parallel}")
        self.params = params
        self.store = store
        self.layout = layout
        self.rank = rank
        self.lock = threading.Lock()
        self._on_event = on_event
        self._links: dict[tuple[str, str], SendLink] = {}
        self._legs: dict[LegKey, tuple[SendingLeg, list[_Notice]]] = {}
        self._closed = False

    @property
    def open_links(self) -> list[str]:
        """Addresses of the decode ranks to which a link is open."""
        with self.lock:
            return [address for address, _ in self._links]

    def open(self, leg: LegKey, ticket: bytes, blocks: Sequence[int], prompt_tokens: int) -> None:
        """Begin a leg: `blocks[i]` holds (or will hold) prompt tokens [i * block_size, (i + 1) * block_size).

        Whatever is wrong with the ticket is reported as SendFailed, and a leg for which this rank has nothing to send
        as Sent, both from within this call.
        """
        try:
            wanted = self._checked(leg, ticket, blocks, prompt_tokens)
        except BatonError as error:
            self._on_event(SendFailed(leg, error))
            return
        sending = self._planned(leg, wanted, blocks)
        if not sending.parts:
            now = time.monotonic()
            self._on_event(Sent(leg, 0, 0, now, now))
            return
        fresh = []
        with self.lock:
            refused = self._closed or leg in self._legs
            if not refused:
                notices: list[_Notice] = []
                for part in sending.parts:
                    key = (wanted.addresses[part.decode_rank], wanted.incarnation)
                    if key not in self._links:
                        self._links[key] = SendLink(self, *key, ticket)
                        fresh.append(self._links[key])
                    self._links[key].add(part, ticket)
                    notices.append((self._links[key], part))
                self._legs[leg] = (sending, notices)
        for link in fresh:
            link.start()
        if refused:
            self._on_event(SendFailed(leg, TransferFailed("the sender is closed, or the leg was opened before")))

    def computed(self, leg: LegKey, tokens: tuple[int, int], layers: tuple[int, int]) -> None:
        """KV of these tokens and layers is in the pool. Only what the decode worker lacks is queued.

        Each cell must be named once. A leg that is not open (any more) is no error.
        """
        with self.lock:
            for link, part in self._notices(leg):
                part.queue(tokens, layers)
                link.offer(part)

    def finish(self, leg: LegKey, first_tokens: bytes) -> None:
        """What decode rank 0 shall get with the end of the leg. Needed on prefill rank 0, without effect elsewhere."""
        with self.lock:
            for link, part in self._notices(leg):
                if part.wants_first_tokens:
                    part.first_tokens = first_tokens
                    link.offer(part)

    def abandon(self, leg: LegKey) -> None:
        """The first token ended the request: send no more, and tell the decode ranks so. No event follows."""
        self._withdraw(leg, "abandon")

    def cancel(self, leg: LegKey) -> None:
        """Start no further frame of the leg after this has returned; its blocks may be reused. No event follows."""
        self._withdraw(leg, "cancel")

    def close(self) -> None:
        """End all links and wait for their threads. No event follows for legs that were open."""
        with self.lock:
            self._closed = True
            self._legs.clear()
            links = list(self._links.values())
            for link in links:
                link.stop()
        for link in links:
            link.join(self.params.frame_timeout_s)

    # From here on: called by links.

    def start_frame(self, part: LegPart) -> bool:
        """Whether the leg still goes on, so that a frame of it may be announced now."""
        with self.lock:
            leg = part.leg.handoff
            if not part.alive:
                return False
            leg.started_at = leg.started_at or time.monotonic()
            return True

    def frame_acknowledged(self, part: LegPart, size: int) -> None:
        """One frame is in the decode rank's pool."""
        with self.lock:
            part.leg.handoff.bytes += size
            part.leg.handoff.frames += 1

    def part_acknowledged(self, part: LegPart) -> None:
        """A decode rank has everything."""
        with self.lock:
            link = next((link for link, other in self._notices(part.leg.key) if other is part), None)
            if link is None:
                return
            link.remove(part)
            leg = part.leg.handoff
            if not leg.acknowledged(part.decode_rank):
                return
            self._legs.pop(part.leg.key)
        now = time.monotonic()
        self._on_event(Sent(part.leg.key, leg.bytes, leg.frames, leg.started_at or now, now))

    def leg_failed(self, key: LegKey, error: BatonError) -> None:
        """The leg cannot go on: tell all its decode ranks, and the worker."""
        if self._end(key, "fail", code=error.code, message=error.message):
            self._on_event(SendFailed(key, error))

    def retire(self, link: SendLink) -> bool:
        """Take an idle link out of use."""
        with self.lock:
            if not link.idle:
                return False
            self._forget_link(link)
            return True

    def link_ended(self, link: SendLink, error: BatonError) -> None:
        """The link is gone: so are its legs."""
        with self.lock:
            self._forget_link(link)
            keys = list(link.parts)
        for key in keys:
            self.leg_failed(key, error)

    def _forget_link(self, link: SendLink) -> None:
        if self._links.get(link.key) is link:
            del self._links[link.key]

    def _notices(self, leg: LegKey) -> list[_Notice]:
        return self._legs[leg][1] if leg in self._legs else []

    def _withdraw(self, leg: LegKey, event: str) -> None:
        self._end(leg, event)

    def _end(self, key: LegKey, event: str, **fields: str) -> bool:
        """Apply a terminal event; False when the leg had ended before."""
        with self.lock:
            leg, notices = self._legs.pop(key, (None, []))
            if leg is None or not leg.handoff.end(event):
                return False
            for link, part in notices:
                link.remove(part)
                link.post(event, leg=key, **fields)
            return True

    def _checked(self, leg: LegKey, ticket: bytes, blocks: Sequence[int], prompt_tokens: int) -> Ticket:
        """The ticket, if this leg can be sent with it. Raises TransferFailed, Incompatible or InternalError."""
        wanted = Ticket.unpack(ticket)
        if found := differences(self.layout, wanted.layout):
            raise Incompatible("prefill and decode KV cannot be converted: " + "; ".join(found))
        if wanted.leg != leg or wanted.prompt_tokens != prompt_tokens:
            raise TransferFailed(
                f"the ticket is for {wanted.prompt_tokens} tokens of {wanted.leg}, not {prompt_tokens} of {leg}"
            )
        if len(blocks) < block_count(prompt_tokens, self.layout.block_size):
            raise InternalError(f"{len(blocks)} blocks of {self.layout.block_size} for {prompt_tokens} prompt tokens")
        return wanted

    def _planned(self, key: LegKey, ticket: Ticket, blocks: Sequence[int]) -> SendingLeg:
        """The leg with a part for each decode rank that this rank speaks to."""
        plan = shares(self.layout.head_ranges, ticket.layout.head_ranges, self.layout.kv_heads)
        needed = (ticket.cached_tokens, ticket.prompt_tokens)
        targets = sorted(
            {target for source, target in plan if source == self.rank} | ({0} if self.rank == 0 else set())
        )
        leg = SendingLeg(key, tuple(blocks), needed, SendLeg(targets))
        for target in targets:
            heads = plan.get((self.rank, target), ())
            cells = length(needed) * self.layout.layers * sum(length(span) for span in heads)
            leg.parts.append(LegPart(leg, target, heads, cells, wants_first_tokens=(self.rank, target) == (0, 0)))
        return leg
