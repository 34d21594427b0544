"""A prefill rank's end: takes what the engine computed, and has its links push it to the decode ranks that need it.

No method blocks on the network; each only changes state under one lock and wakes a link's thread. The pool's blocks
are the queue: `computed` notes ranges, and a link gathers them when it is their turn. A leg that finds no place for a
link waits in line, at most for as long as its ticket lives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..proto.errors import BatonError, Incompatible, InternalError, TransferFailed
from ..proto.kv_layout import KVLayout, block_count
from .block_store import BlockStore
from .compat import differences
from .events import LegKey, SendEvent, SendFailed, Sent
from .handoff import SendLeg
from .link_pool import LinkKey, LinkPool
from .params import TransferParams
from .plan import Box, length, shares
from .send_leg import LegPart, SendingLeg
from .send_link import SendLink
from .ticket import Ticket
from .tls import client_context
from .topology import place_here


@dataclass(slots=True, eq=False)
class _OpenLeg:
    """A leg that has not come to its end."""

    sending: SendingLeg
    ticket: bytes
    keys: list[LinkKey]  # the link of each part
    deadline: float  # for having links
    links: list[SendLink] = field(default_factory=list)  # of each part; empty while it waits for them
    abandoned: bool = False  # while it waited: only that is left to say


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
        self.place = place_here(store.device.type)
        self.tls = client_context(params.tls)
        self.lock = threading.Lock()
        self._on_event = on_event
        self._pool: LinkPool[SendLink] = LinkPool(params.max_links)
        self._legs: dict[LegKey, _OpenLeg] = {}
        self._line: dict[LegKey, _OpenLeg] = {}  # those without links, first come first served
        self._line_changed = threading.Condition(self.lock)
        self._watcher: threading.Thread | None = None  # of the line's deadlines; while there is a line
        self._closed = False

    @property
    def open_links(self) -> list[str]:
        """Addresses of the decode ranks to which a link is open."""
        with self.lock:
            return [address for address, _ in self._pool.keys]

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
        keys = [(wanted.addresses[part.decode_rank], wanted.incarnation) for part in sending.parts]
        if len(keys) > self.params.max_links:
            self._on_event(SendFailed(leg, InternalError(f"needs {len(keys)} links, more than kv.max_links")))
            return
        opened = _OpenLeg(sending, ticket, keys, time.monotonic() + wanted.lifetime_s)
        with self.lock:
            refused = self._closed or leg in self._legs
            if not refused:
                self._legs[leg] = self._line[leg] = opened
                self._admit()
                if self._line:
                    self._watch()
        if refused:
            self._on_event(SendFailed(leg, TransferFailed("the sender is closed, or the leg was opened before")))

    def computed(self, leg: LegKey, tokens: tuple[int, int], layers: tuple[int, int]) -> None:
        """KV of these tokens and layers is in the pool. Only what the decode worker lacks is queued.

        Each cell must be named once. A leg that is not open (any more) is no error.
        """
        with self.lock:
            for part, link in self._parts(leg):
                part.queue(tokens, layers)
                if link is not None:
                    link.offer(part)

    def finish(self, leg: LegKey, first_tokens: bytes) -> None:
        """What decode rank 0 shall get with the end of the leg. Needed on prefill rank 0, without effect elsewhere."""
        with self.lock:
            for part, link in self._parts(leg):
                if part.wants_first_tokens:
                    part.first_tokens = first_tokens
                    if link is not None:
                        link.offer_end(part)

    def abandon(self, leg: LegKey) -> None:
        """The first token ended the request: send no more, and tell the decode ranks so. No event follows."""
        self._end(leg, "abandon")

    def cancel(self, leg: LegKey) -> None:
        """Start no further frame of the leg after this has returned; its blocks may be reused. No event follows."""
        self._end(leg, "cancel")

    def close(self) -> None:
        """End all links and wait for their threads. No event follows for legs that were open."""
        with self.lock:
            self._closed = True
            self._legs.clear()
            self._line.clear()
            self._line_changed.notify_all()
            links, watcher = self._pool.all, self._watcher
            for link in links:
                link.stop()
        for link in links:
            link.join(self.params.frame_timeout_s)
        if watcher is not None:
            watcher.join(self.params.frame_timeout_s)

    # From here on: called by links.

    def start_frame(self, part: LegPart) -> bool:
        """Whether the leg still goes on, so that a frame of it may be sent now."""
        with self.lock:
            leg = part.leg.handoff
            if not part.alive:
                return False
            leg.started_at = leg.started_at or time.monotonic()
            return True

    def frames_acknowledged(self, part: LegPart, size: int, frames: int) -> None:
        """So many bytes in so many frames are in the decode rank's pool."""
        with self.lock:
            part.leg.handoff.bytes += size
            part.leg.handoff.frames += frames

    def frame_postponed(self, part: LegPart, box: Box) -> None:
        """The decode rank does not expect the leg yet: announce the frame again once it says so."""
        with self.lock:
            if part.alive:
                part.held = True
                part.cut.appendleft(box)

    def part_acknowledged(self, part: LegPart) -> None:
        """A decode rank has everything."""
        with self.lock:
            link = next((link for other, link in self._parts(part.leg.key) if other is part), None)
            if link is None:
                return
            link.remove(part)
            leg = part.leg.handoff
            over = leg.acknowledged(part.decode_rank)
            if over:
                self._legs.pop(part.leg.key)
            self._admit()
        if not over:
            return
        now = time.monotonic()
        self._on_event(Sent(part.leg.key, leg.bytes, leg.frames, leg.started_at or now, now))

    def leg_failed(self, key: LegKey, error: BatonError) -> None:
        """The leg cannot go on: tell all its decode ranks, and the worker."""
        if self._end(key, "fail", code=error.code, message=error.message):
            self._on_event(SendFailed(key, error))

    def unused(self, link: SendLink) -> None:
        """The link has nothing to do for a moment: somebody may wait for its place."""
        with self.lock:
            self._admit()

    def retire(self, link: SendLink) -> bool:
        """Take an idle link out of use."""
        with self.lock:
            if not link.idle:
                return False
            self._pool.leave(link)
            return True

    def link_ended(self, link: SendLink, error: BatonError) -> None:
        """The link is of no use any more: neither are its legs."""
        with self.lock:
            self._pool.leave(link)
            keys = list(link.parts)
        for key in keys:
            self.leg_failed(key, error)

    def link_closed(self, link: SendLink) -> None:
        """The link's descriptors are closed: its place is free."""
        with self.lock:
            self._pool.gone(link)
            self._admit()

    def _admit(self) -> None:
        """Give the first in line their links, for as long as there is room. With the lock held."""
        while self._line and not self._closed:
            key, leg = next(iter(self._line.items()))
            got = self._pool.obtain(leg.keys, partial(self._link, leg.ticket))
            if got is None:
                return
            links, fresh = got
            del self._line[key]
            self._line_changed.notify_all()
            leg.links = [links[link] for link in leg.keys]
            for part, link in zip(leg.sending.parts, leg.links, strict=True):
                link.add(part, leg.ticket)
                link.offer(part)
                if leg.abandoned:
                    link.remove(part)
                    link.post("abandon", leg=key)
            for link in fresh:
                link.start()

    def _link(self, ticket: bytes, key: LinkKey) -> SendLink:
        address, incarnation = key
        return SendLink(self, address, incarnation, ticket)

    def _watch(self) -> None:
        """Have somebody look at the deadlines of those in line. With the lock held."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._expire, name="kv-line", daemon=True)
            self._watcher.start()

    def _expire(self) -> None:
        """Fail legs whose ticket dies while they wait for a link; ends with the line."""
        while True:
            with self.lock:
                now = time.monotonic()
                late = [key for key, leg in self._line.items() if leg.deadline <= now]
                if not late:
                    if not self._line:
                        self._watcher = None
                        return
                    self._line_changed.wait(min(leg.deadline for leg in self._line.values()) - now)
                for key in late:
                    del self._line[key]
            for key in late:
                limit = self.params.max_links
                self.leg_failed(key, TransferFailed(f"none of {limit} links (kv.max_links) became free in time"))

    def _parts(self, leg: LegKey) -> list[tuple[LegPart, SendLink | None]]:
        """Each part with its link, if the leg has its links already."""
        opened = self._legs.get(leg)
        if opened is None:
            return []
        links: Sequence[SendLink | None] = opened.links or [None] * len(opened.sending.parts)
        return list(zip(opened.sending.parts, links, strict=True))

    def _end(self, key: LegKey, event: str, **fields: str) -> bool:
        """Apply a terminal event; False when the leg had ended before."""
        with self.lock:
            parts = self._parts(key)
            leg = self._legs.pop(key, None)
            if leg is None or not leg.sending.handoff.end(event):
                return False
            leg.abandoned = event == "abandon"
            if not leg.abandoned:
                self._line.pop(key, None)
            for part, link in parts:
                part.drop()
                if link is not None:
                    link.remove(part)
                    link.post(event, leg=key, **fields)
            self._admit()
            self._line_changed.notify_all()
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
