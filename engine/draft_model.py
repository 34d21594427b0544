"""A draft model: a second, smaller model in the same process proposes what it would say itself.

It has its own KV pool on the leader's rank alone. It draws as the request asks, with the same noise (seed, position,
token id) as the model that it serves: greedy requests get greedy proposals, and for sampled ones the two agree more
often than by chance. What it wrote for proposals that did not stand is dropped when the sequence is seen again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ..proto.kv_layout import block_count
from .block_pool import BlockPool
from .proposal_length import READ_AT_ONCE
from .proposer import SequenceName, Wanted
from .runner import Runner
from .step import Draw, SequenceStep


@dataclass(slots=True)
class _Followed:
    """A sequence in the draft model's pool."""

    table: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # tokens whose KV is there
    sure: int = 0  # of these, the leading ones that were compared with the history


@dataclass(slots=True)
class _Run:
    """One sequence during a call of `propose`."""

    index: int
    wanted: Wanted
    followed: _Followed
    tokens: list[int]  # to run next
    last: int  # how many to propose
    reads: bool  # the tokens are not all that the sequence lacks: nothing is drawn yet
    said: list[int] = field(default_factory=list)


class DraftModel:
    """A `Proposer`. `vocab_size`: of the model that it serves; the draft's own may be padded otherwise."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner = runner
        self._pool = BlockPool(runner.blocks, runner.layout.block_size, prefix_cache=False)
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._followed: dict[SequenceName, _Followed] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """See Proposer."""
        proposals: list[list[int]] = [[] for _ in wanted]
        runs = self._begin(wanted)
        while runs:
            self._step(runs)
            for run in runs:
                proposals[run.index] = run.said
            runs = [run for run in runs if self._goes_on(run)]
        return proposals

    def unread(self, name: SequenceName, prompt: int) -> int:
        """See Proposer."""
        followed = self._followed.get(name)
        return max(prompt - len(followed.written), 0) if followed else prompt

    def keep(self, names: Collection[SequenceName]) -> None:
        """See Proposer."""
        for name in self._followed.keys() - set(names):
            self._pool.release(self._followed.pop(name).table)

    def _begin(self, wanted: Sequence[Wanted]) -> list[_Run]:
        """Those that the pool, the context and this call's budget have room for."""
        runs: list[_Run] = []
        budget = READ_AT_ONCE
        for index, one in enumerate(wanted):
            history = [*one.draw.prompt, *one.draw.generated]
            followed = self._followed.setdefault(one.name, _Followed())
            _roll_back(followed, history)
            lacking = history[len(followed.written) :]
            tokens = lacking[:budget]
            count = min(one.count, self._runner.max_model_len - len(history))
            if not tokens or count < 1 or max(tokens) >= self._vocab_size:
                continue
            reads = len(tokens) < len(lacking)
            if self._make_room(followed, len(followed.written) + len(tokens) + (0 if reads else count - 1)):
                budget -= len(tokens)
                runs.append(_Run(index, one, followed, tokens, count, reads))
        return runs

    def _make_room(self, followed: _Followed, tokens: int) -> bool:
        lacking = block_count(tokens, self._pool.block_size) - len(followed.table)
        if lacking > self._pool.free:
            return False
        followed.table += self._pool.allocate(max(lacking, 0))
        return True

    def _step(self, runs: Sequence[_Run]) -> None:
        """Every run's tokens through the model; what it draws is said, and is what runs next."""
        drawn = iter(self._runner.decode([self._step_for(run) for run in runs]))
        for run in runs:
            run.followed.written += run.tokens
            run.tokens = []
            if not run.reads:
                run.tokens = [token.token_id for token in next(drawn)]
                run.said += run.tokens

    def _step_for(self, run: _Run) -> SequenceStep:
        draw = None if run.reads else self._draw(run.wanted.draw, run.said)
        start = len(run.followed.written)
        return SequenceStep(*run.wanted.name[0], run.tokens, start, run.followed.table, draw)

    def _draw(self, draw: Draw, said: list[int]) -> Draw:
        bias = {token: value for token, value in draw.params.logit_bias.items() if token < self._runner.vocab_size}
        params = replace(draw.params, logprobs=None, logit_bias=bias)
        return replace(draw, params=params, generated=[*draw.generated, *said])

    def _goes_on(self, run: _Run) -> bool:
        """Whether there is more to draw. A token that the served model does not have is not proposed."""
        if run.said and run.said[-1] >= self._vocab_size:
            run.said.pop()
            return False
        return bool(run.tokens) and len(run.said) < run.last


def _roll_back(followed: _Followed, history: list[int]) -> None:
    """Keep what was written of the history, and of that all but the last token: its row is what proposals follow."""
    written, stop = followed.written, min(len(followed.written), len(history) - 1)
    while followed.sure < stop and written[followed.sure] == history[followed.sure]:
        followed.sure += 1
    followed.sure = min(followed.sure, stop)
    del written[followed.sure :]
