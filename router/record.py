"""What one request's phases cost, gathered from events as they pass through the router.

Times at the router come from its own monotonic clock; the workers report durations. What lies between two workers is
taken from their clocks where these are one and the same, and else from when the router heard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..proto import worker_pb2 as pb
from .requests import Chunk, Timing, Usage
from .trace_context import Phase


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happened at a worker, by its clock (empty: unknown), and when the router heard of it; seconds."""

    clock: str
    at: float
    heard: float

    def since(self, earlier: Moment) -> float:
        """Seconds between the two; never negative."""
        shared = self.clock and self.clock == earlier.clock
        return max(0.0, self.at - earlier.at if shared else self.heard - earlier.heard)


class Record:
    """The measurements of one request. All `now` are seconds of one monotonic clock."""

    def __init__(self, now: float, prompt_tokens: int, choices: int) -> None:
        self.received = now
        self.prompt_tokens = prompt_tokens
        self.first_at: float | None = None  # first token at the router
        self.first_text_at: float | None = None  # first text that is not held back
        self.last_at = now
        self.second_gap: float | None = None  # token 1 to token 2
        self.gate_s = 0.0
        self.prefill_worker = ""
        self.decode_worker = ""
        self.prefill_cached: int | None = None
        self.decode_cached = 0
        self.kv_bytes = 0
        self.kv_frames = 0
        self._reserve_s = 0.0
        self._queue_s = 0.0
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._exposed_s = 0.0
        self._drawn: dict[int, Moment] = {}  # by attempt: the end of prefill compute
        self._committed: dict[int, Moment] = {}
        self._second: tuple[int, Moment] | None = None  # the first token that was decoded, with its attempt
        self._last_of_choice: list[float | None] = [None] * choices

    def placed(self, prefill: str, decode: str) -> None:
        """The workers that serve the request (the latest ones)."""
        self.prefill_worker, self.decode_worker = prefill, decode

    def moved(self, decode: str) -> None:
        """Another decode worker goes on with KV that exists."""
        self.decode_worker = decode

    def ticket(self, event: pb.Ticket) -> None:
        """Decode blocks were reserved."""
        self._reserve_s += event.waited_s
        self.decode_cached = event.cached_tokens

    def prefilled(self, event: pb.FirstTokens, now: float, clock: str) -> None:
        """A prefill ended. clock: the worker's, as in its Welcome."""
        self._drawn[event.leg.attempt] = Moment(clock, event.drawn_at, now)
        self._queue_s += event.queue_s
        self._prefill_s += event.prefill_s
        if self.prefill_cached is None:
            self.prefill_cached = event.cached_tokens

    def sent(self, event: pb.Sent) -> None:
        """A transfer ended at its sender."""
        self._transfer_s += event.transfer_s
        self._exposed_s += event.exposed_s

    def committed(self, event: pb.Committed, now: float, clock: str) -> None:
        """A transfer is whole at its receiver. clock: as above."""
        self._committed[event.leg.attempt] = Moment(clock, event.at, now)
        self.kv_bytes += event.bytes
        self.kv_frames += event.frames

    def stepped(self, attempt: int, tokens: Sequence[pb.Token], at: float, now: float, clock: str) -> None:
        """A decode step brought these tokens, which may have gone to the client before. clock: as above."""
        if self._second is None and any(token.index == 1 for token in tokens):
            self._second = (attempt, Moment(clock, at, now))

    @property
    def second_awaited(self) -> bool:
        """Whether `stepped` has something to learn yet."""
        return self._second is None

    @property
    def under_way(self) -> bool:
        """Whether all is known of the answer's beginning: what comes now are its later tokens."""
        return self._second is not None and self.second_gap is not None and self.first_text_at is not None

    def emitted(self, chunk: Chunk, now: float) -> float | None:
        """Tokens left for the client; the gap between each of them and the one before it, None for a choice's first."""
        before, self._last_of_choice[chunk.choice] = self._last_of_choice[chunk.choice], now
        self.last_at = now
        if self.first_text_at is None and chunk.text:
            self.first_text_at = now
        if before is None:
            if self.first_at is None:
                self.first_at = now
            return None
        if self.second_gap is None:
            self.second_gap = now - before
        return (now - before) / len(chunk.token_ids)  # those of a step with proposals share its time

    def went_on(self, last: float) -> None:
        """Further tokens of the only choice have left for the client, until `last`."""
        self.last_at = self._last_of_choice[0] = last

    def phases(self) -> list[Phase]:
        """The parts of the latest pass through the workers that are known, each within the request.

        Durations are the workers' own; a phase ends when the router heard of its end.
        """
        found: list[Phase] = []
        if self._drawn:
            attempt, drawn = max(self._drawn.items())
            begun = max(self.received, drawn.heard - self._prefill_s)
            found += [Phase("queue", self.received, begun), Phase("prefill", begun, drawn.heard)]
            committed = self._committed.get(attempt)
            if committed is not None:
                found.append(Phase("transfer", max(begun, committed.heard - self._transfer_s), committed.heard))
        if self.first_at is not None and self.last_at > self.first_at:
            found.append(Phase("decode", self.first_at, self.last_at))
        return found

    @property
    def queue_s(self) -> float:
        """Waiting before prefill compute: in the router for the lookahead, at D for blocks, at P for its turn."""
        return self.gate_s + self._reserve_s + self._queue_s

    @property
    def prefill_s(self) -> float:
        """Prefill compute."""
        return self._prefill_s

    @property
    def decode_s(self) -> float:
        """Token 1 to the last token."""
        return self.last_at - self.first_at if self.first_at is not None else 0.0

    def usage(self, completion_tokens: int) -> Usage:
        """Counts of the whole request."""
        return Usage(self.prompt_tokens, completion_tokens, self.prefill_cached or 0)

    def _worker_gap_s(self) -> float:
        attempt, moment = self._second or (-1, None)
        return moment.since(self._drawn[attempt]) if moment is not None and attempt in self._drawn else 0.0

    def timing(self, now: float, attempts: int, preemptions: int) -> Timing:
        """The summary for the client."""
        return Timing(
            total_s=now - self.received,
            ttft_s=self.first_at - self.received if self.first_at is not None else 0.0,
            reserve_s=self._reserve_s,
            prefill_queue_s=self.gate_s + self._queue_s,
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
            transfer_exposed_s=self._exposed_s,
            commit_s=sum(
                moment.since(self._drawn[key]) for key, moment in self._committed.items() if key in self._drawn
            ),
            first_gap_s=self.second_gap or 0.0,
            worker_gap_s=self._worker_gap_s(),
            decode_s=self.decode_s,
            kv_bytes=self.kv_bytes,
            kv_frames=self.kv_frames,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            prefill_cached_tokens=self.prefill_cached or 0,
            decode_cached_tokens=self.decode_cached,
            attempts=attempts,
            preemptions=preemptions,
        )
