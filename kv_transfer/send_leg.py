"""A leg as a prefill rank keeps it: what is needed, what is queued for each link, what is still on its way.

Not thread-safe: the sender's lock guards it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .events import LegKey
from .handoff import SendLeg
from .plan import Box, Range, joined, length, pieces


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

    @property
    def alive(self) -> bool:
        """Whether frames may still be started."""
        return self.leg.handoff.open

    @property
    def ready(self) -> bool:
        """Whether a frame could be started."""
        return self.alive and bool(self.boxes or self.cut)

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
        for heads in self.heads:
            box = Box(tokens, layers, heads)
            self.queued += box.volume
            for back in range(1, min(len(self.boxes), len(self.heads)) + 1):
                if (both := joined(self.boxes[-back], box)) is not None:
                    self.boxes[-back] = both
                    break
            else:
                self.boxes.append(box)

    def take(self, cell_bytes: int, frame_bytes: int) -> Box:
        """The next frame's box, of those that are `ready`."""
        if not self.cut:
            self.cut.extend(pieces(self.boxes.popleft(), cell_bytes, frame_bytes))
        return self.cut.popleft()

    def drop(self) -> None:
        """Forget what is queued."""
        self.boxes.clear()
        self.cut.clear()
