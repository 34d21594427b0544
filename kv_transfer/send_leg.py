"""A leg as a prefill rank keeps it: what is needed, what is queued for each link, what is still on its way.

The last push of the engine is announced before it is computed (`promise`), when nothing else is left: the decode rank
has then accepted it by the time it can be sent, and the request waits for no round trip.

Not thread-safe: the sender's lock guards it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .events import LegKey
from .frames import MAX_PARCEL_BYTES, MAX_PARCEL_FRAMES, TRAILER_BYTES
from .handoff import SendLeg
from .plan import Box, Range, joined, length, pieces

_PARCELS = 20  # announcements of a leg, about, when it is computed bit by bit: each is answered by two messages
_FULL = 4  # when much is queued, a parcel takes so many times what is worth a message, and no less than _FRAMES frames
_FRAMES = 12  # of a leg, at least: both ends work at the same time on all but the first and the last
_LEAST_SHARE = 4  # and no smaller than this part of the largest frame: each costs both ends some time of its own


def frame_target(due: int, cell_bytes: int, frame_bytes: int) -> int:
    """Bytes of the frames that a part of `due` cells is cut into."""
    return min(frame_bytes, max(due * cell_bytes // _FRAMES, frame_bytes // _LEAST_SHARE, 1))


def worth_cells(due: int, cell_bytes: int, frame_bytes: int) -> int:
    """How many cells of a part of `due` cells are worth an announcement: a frame, and a twentieth of the part."""
    enough = max(frame_bytes, due * cell_bytes // _PARCELS)
    return max(1, min(enough, MAX_PARCEL_BYTES - 3 * frame_bytes) // cell_bytes)


@dataclass(slots=True, eq=False)
class SendingLeg:
    """One leg over all links of this rank."""

    key: LegKey
    blocks: tuple[int, ...]
    needed: Range  # prompt tokens that the decode worker lacks
    handoff: SendLeg
    parts: list[LegPart] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LegPart:
    """The share of a leg that goes to one decode rank."""

    leg: SendingLeg
    decode_rank: int
    heads: tuple[Range, ...]
    due: int  # cells to send in all
    wants_first_tokens: bool  # this link carries what `finish` brings
    first_tokens: bytes | None = None
    queued: int = 0  # cells handed over by the engine so far
    boxes: deque[Box] = field(default_factory=deque)
    cut: deque[Box] = field(default_factory=deque)  # the box that is being sent, in frames
    done_sent_at: float | None = None
    held: bool = False  # until the decode rank expects the leg
    frame_bytes: int = 0  # that frames are cut to
    worth: int = 0  # cells for which a message is worth sending while more are to come
    step: int = 0  # cells of the last push of the engine
    rest: list[Box] = field(default_factory=list)  # what the next push brings, when that is known to be the last
    promised: bool = False  # that was announced

    @property
    def alive(self) -> bool:
        """Whether frames may still be started."""
        return self.leg.handoff.open

    @property
    def ready(self) -> bool:
        """Whether frames should be started: enough is queued for them, or nothing (but the very last push) is missing.

        The last push goes alone: what is left to send once everything is computed is what the request waits for.
        """
        if not self.alive or self.held or not (self.boxes or self.cut) or (self.promised and self.computing):
            return False
        return bool(self.rest) or self.due - self.queued <= min(self.step, self.worth) or self.pending >= self.worth

    @property
    def promising(self) -> bool:
        """Whether the last push should be announced now, before it is computed."""
        return self.alive and not (self.held or self.promised or self.boxes or self.cut) and bool(self.rest)

    @property
    def computing(self) -> bool:
        """Whether the engine has more to push."""
        return self.alive and self.queued < self.due

    @property
    def pending(self) -> int:
        """Cells that are queued and not taken."""
        return sum(box.volume for box in self.boxes) + sum(box.volume for box in self.cut)

    @property
    def finished(self) -> bool:
        """Whether every frame was started and only `done` is left to say."""
        return (
            self.alive
            and self.done_sent_at is None
            and self.queued == self.due
            and not (self.boxes or self.cut)
            and (not self.wants_first_tokens or self.first_tokens is not None)
        )

    def queue(self, tokens: Range, layers: Range) -> None:
        """The engine computed this; it joins what is queued and adjacent."""
        tokens = (max(tokens[0], self.leg.needed[0]), min(tokens[1], self.leg.needed[1]))
        if length(tokens) <= 0 or length(layers) <= 0:
            return
        before = self.queued
        for heads in self.heads:
            box = Box(tokens, layers, heads)
            self.queued += box.volume
            if self.promised:
                continue
            for back in range(1, min(len(self.boxes), len(self.heads)) + 1):
                if (both := joined(self.boxes[-back], box)) is not None:
                    self.boxes[-back] = both
                    break
            else:
                self.boxes.append(box)
        self.step = self.queued - before
        self.rest = [] if self.promised else self._rest(tokens, layers)
        while len(self.boxes) > 1 and (both := joined(self.boxes[-2], self.boxes[-1])) is not None:
            self.boxes.pop()  # a chunk has all its layers now, like the one before
            self.boxes[-1] = both

    def take(self, cell_bytes: int, frame_bytes: int) -> Box:
        """The next frame's box, of those that are `ready`."""
        if not self.cut:
            self.cut.extend(pieces(self.boxes.popleft(), cell_bytes, frame_bytes))
        return self.cut.popleft()

    def take_parcel(self, cell_bytes: int, frame_bytes: int) -> list[Box]:
        """The boxes of frames to announce together, of what is `ready`: as much as is worth a message, or more."""
        taken = [self.take(cell_bytes, frame_bytes)]
        cells, enough = taken[0].volume, max(_FULL * self.worth, _FRAMES * frame_bytes // cell_bytes)
        while cells < enough and len(taken) < MAX_PARCEL_FRAMES and (self.boxes or self.cut):
            box = self.take(cell_bytes, frame_bytes)
            cells += box.volume
            if cells * cell_bytes + (len(taken) + 1) * TRAILER_BYTES > MAX_PARCEL_BYTES:
                self.cut.appendleft(box)
                break
            taken.append(box)
        return taken

    def promise(self, cell_bytes: int, frame_bytes: int) -> list[Box]:
        """The boxes of the last push's frames, when it is `promising`; none when they are too many for one parcel."""
        taken = [piece for box in self.rest for piece in pieces(box, cell_bytes, frame_bytes)]
        size = sum(box.volume for box in self.rest) * cell_bytes + len(taken) * TRAILER_BYTES
        self.rest = []
        self.promised = len(taken) <= MAX_PARCEL_FRAMES and size <= MAX_PARCEL_BYTES
        return taken if self.promised else []

    def _rest(self, tokens: Range, layers: Range) -> list[Box]:
        """All that is due after this push, if the next one can bring it: the same tokens' last layers, and no more."""
        a_layer = length(tokens) * sum(length(heads) for heads in self.heads)
        count, odd = divmod(self.due - self.queued, max(1, a_layer))
        if tokens[1] != self.leg.needed[1] or odd or not 0 < count <= length(layers):
            return []
        return [Box(tokens, (layers[1], layers[1] + count), heads) for heads in self.heads]

    @property
    def last_taken(self) -> bool:
        """Whether the leg's last frame was given out."""
        return (self.promised or self.queued == self.due) and not (self.boxes or self.cut)

    def drop(self) -> None:
        """Forget what is queued."""
        self.boxes.clear()
        self.cut.clear()
        self.rest.clear()
