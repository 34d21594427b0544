"""The whole engine in one loop, without transfer: the monolithic run that the disaggregated path must equal.

schedule -> run -> postprocess, with continuous batching, chunked prefill, prefix cache, choices that share their
prompt's blocks until they write, and preemption by recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from ..proto.errors import InvalidRequest
from ..proto.kv_layout import block_count
from ..proto.sampling import SamplingParams, finish_reason
from .block_pool import BlockPool
from .proposer import SequenceName
from .runner import Runner
from .speculation import Speculator, name_of
from .step import Draw, SampledToken, SequenceStep

Request = tuple[list[int], SamplingParams]
CopyBlocks = Callable[[Sequence[tuple[int, int]]], None]
_SALT = ""


@dataclass(frozen=True, slots=True)
class LocalChoice:
    """One finished choice. The token that ended it is included; `finish_reason` is stop or length."""

    token_ids: list[int]
    finish_reason: str
    tokens: list[SampledToken]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence, live or waiting. Before its first token it stands for all choices of its request."""

    request: int
    choices: tuple[int, ...]
    prompt: list[int]
    params: SamplingParams
    tokens: list[SampledToken] = field(default_factory=list)
    all_ids: list[int] = field(default_factory=list)  # prompt and output
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is in the pool

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be drawn."""
        return len(self.all_ids) - self.computed


class LocalEngine:
    """A pool and a runner. `copy_blocks` copies blocks on every rank; with one rank it is `runner.kv.copy_blocks`."""

    def __init__(
        self, runner: Runner, pool: BlockPool, copy_blocks: CopyBlocks, speculator: Speculator | None = None
    ) -> None:
        self.preemptions = 0
        self.steps = 0
        self._runner = runner
        self._pool = pool
        self._copy_blocks = copy_blocks
        self._speculator = speculator
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # oldest first
        self._finished: list[dict[int, LocalChoice]] = []

    def generate(self, requests: Sequence[Request], chunk: int, max_sequences: int) -> list[list[LocalChoice]]:
        """Run all requests to their end; the choices of each, in the order of the requests.

        `chunk`: prompt tokens a step; `max_sequences`: sequences that are admitted side by side. Raises InvalidRequest
        for a request that is empty, longer than the context, or larger than the pool.
        """
        self._begin(requests, chunk, max_sequences)
        while self._waiting or self._running:
            self._turn(chunk, max_sequences)
        return [[choices[index] for index in sorted(choices)] for choices in self._finished]

    def stream(self, prompt: list[int], params: SamplingParams, chunk: int) -> Generator[SampledToken, None, None]:
        """The tokens of one request with one choice, as they are drawn; closing it early frees its blocks.

        Raises InvalidRequest as `generate` does, before the first token. Nothing else may run meanwhile.
        """
        if params.n != 1:
            raise ValueError(f"a stream has one choice, not {params.n}")
        self._begin([(prompt, params)], chunk, 1)
        sequence, told = self._waiting[0], 0
        try:
            while self._waiting or self._running:
                self._turn(chunk, 1)
                yield from sequence.tokens[told:]
                told = len(sequence.tokens)
        finally:
            for left in self._running:
                self._pool.release(left.blocks)
            self._running.clear()
            self._waiting.clear()

    def _begin(self, requests: Sequence[Request], chunk: int, max_sequences: int) -> None:
        if chunk < 1 or max_sequences < 1:
            raise ValueError(f"nothing would run: chunk {chunk}, max_sequences {max_sequences}")
        for prompt, params in requests:
            self._check(prompt, params)
        if self._speculator is not None:
            self._speculator.lengths([])  # names begin again
        self._finished = [{} for _ in requests]
        self._waiting = deque(
            _Sequence(index, tuple(range(params.n)), prompt, params, all_ids=list(prompt))
            for index, (prompt, params) in enumerate(requests)
        )

    def _turn(self, chunk: int, max_sequences: int) -> None:
        batch = self._schedule(chunk, max_sequences)
        steps = [self._step(sequence, count) for sequence, count in batch]
        speculator = self._speculator
        if speculator is not None:
            self._look_ahead(batch, speculator.lengths([name_of(step) for step in steps]))
            steps = speculator.extend([self._step(sequence, count) for sequence, count in batch])
        drawn = self._runner.prefill(steps, None)
        self.steps += 1
        if speculator is not None:
            speculator.observe(steps, drawn)
        self._postprocess(batch, drawn)

    def _look_ahead(self, batch: list[tuple[_Sequence, int]], lengths: Mapping[SequenceName, int]) -> None:
        """Room for proposals, out of blocks that no sequence can want in the next step."""
        size = self._pool.block_size
        for (sequence, count), length in zip(batch, lengths.values(), strict=True):
            wanted = block_count(sequence.computed + count + length, size) if sequence.tokens else 0
            while len(sequence.blocks) < wanted and self._pool.free > len(self._running):
                sequence.blocks += self._pool.allocate(1)

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        longest = len(prompt) + params.max_tokens
        if not prompt or longest > self._runner.max_model_len:
            limit = self._runner.max_model_len
            raise InvalidRequest(f"{len(prompt)} prompt tokens and {params.max_tokens} more in a context of {limit}")
        if block_count(longest - 1, self._pool.block_size) > self._pool.total:
            raise InvalidRequest(f"{longest - 1} tokens in a pool of {self._pool.total} x {self._pool.block_size}")

    def _schedule(self, chunk: int, max_sequences: int) -> list[tuple[_Sequence, int]]:
        """Which sequences run how many tokens. Each has its blocks afterwards, and none of them is shared there."""
        batch: list[tuple[_Sequence, int]] = []
        budget = chunk
        for sequence in list(self._running):
            count = 1 if sequence.remaining == 1 else min(sequence.remaining, budget)
            if count and sequence in self._running and self._grow(sequence, count):
                budget -= count if sequence.remaining > 1 else 0
                batch.append((sequence, count))
        while self._waiting and budget and len(self._running) < max_sequences:
            sequence = self._waiting[0]
            count = self._admit(sequence, budget)
            if not count:
                break
            self._running.append(self._waiting.popleft())
            budget -= min(count, budget)
            batch.append((sequence, count))
        return batch

    def _admit(self, sequence: _Sequence, budget: int) -> int:
        """Give a waiting sequence cached blocks and those of its first chunk; 0 when there are not enough."""
        found = self._pool.match(sequence.all_ids[:-1], _SALT)
        computed = len(found) * self._pool.block_size
        count = min(len(sequence.all_ids) - computed, budget)
        needed = block_count(computed + count, self._pool.block_size) - len(found)
        if needed > self._pool.free_after_pin(found):
            return 0
        self._pool.pin(found)
        self._pool.record_lookup(len(sequence.all_ids), computed)
        sequence.blocks = found + self._pool.allocate(needed)
        sequence.computed = computed
        return count

    def _grow(self, sequence: _Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, at the newest sequences' cost. False: it was the newest and has to wait."""
        size = self._pool.block_size
        written = sequence.computed // size  # the first block that is written
        shared = written < len(sequence.blocks) and self._pool.references(sequence.blocks[written]) > 1
        needed = max(block_count(sequence.computed + count, size) - len(sequence.blocks), 0) + shared
        while needed > self._pool.free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        fresh = self._pool.allocate(needed)
        if shared:
            old, new = sequence.blocks[written], fresh.pop(0)
            self._copy_blocks([(old, new)])
            self._pool.release([old])
            sequence.blocks[written] = new
        sequence.blocks += fresh
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _step(self, sequence: _Sequence, count: int) -> SequenceStep:
        start, end = sequence.computed, sequence.computed + count
        draw = None
        if end == len(sequence.all_ids):
            generated = sequence.all_ids[len(sequence.prompt) :]
            draw = Draw(sequence.params, sequence.choices, sequence.prompt, generated)
        name = f"local-{sequence.request}"
        return SequenceStep(
            name, 0, sequence.choices[0], sequence.all_ids[start:end], start, list(sequence.blocks), draw
        )

    def _postprocess(self, batch: list[tuple[_Sequence, int]], drawn: list[list[SampledToken]]) -> None:
        results = iter(drawn)
        for sequence, count in batch:
            sequence.computed += count
            self._pool.publish(sequence.blocks, sequence.all_ids[: sequence.computed], _SALT)
            if not sequence.remaining:
                self._extend(sequence, next(results))

    def _extend(self, sequence: _Sequence, tokens: list[SampledToken]) -> None:
        """Add the drawn tokens; further choices become sequences of their own that share the blocks."""
        if len(sequence.choices) == 1:
            sequence.computed += len(tokens) - 1  # proposals that stood: their KV is there
            for token in tokens:
                if self._add(sequence, token):
                    break
            return
        sequences = [sequence]
        for token in tokens[1:]:
            self._pool.pin(sequence.blocks)
            sequences.append(
                _Sequence(
                    sequence.request,
                    (token.choice,),
                    sequence.prompt,
                    sequence.params,
                    all_ids=list(sequence.all_ids),
                    blocks=list(sequence.blocks),
                    computed=sequence.computed,
                )
            )
        sequence.choices = sequence.choices[:1]
        place = self._running.index(sequence)
        self._running[place : place + 1] = sequences
        for one, token in zip(sequences, tokens, strict=True):
            self._add(one, token)

    def _add(self, sequence: _Sequence, token: SampledToken) -> bool:
        """One more token; whether it is the last. Raises what kept it from being drawn."""
        if token.error:
            raise token.error
        sequence.tokens.append(token)
        sequence.all_ids.append(token.token_id)
        reason = finish_reason(sequence.params, token.token_id, len(sequence.tokens))
        if reason:
            self._running.remove(sequence)
            self._pool.release(sequence.blocks)
            ids = [drawn.token_id for drawn in sequence.tokens]
            self._finished[sequence.request][token.choice] = LocalChoice(ids, reason, sequence.tokens)
        return bool(reason)
