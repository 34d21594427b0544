"""A worker's speculation as its parameters ask for it: a draft model is found and compared, costs are measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ..proto.errors import ConfigError
from ..proto.kv_layout import block_count
from ..text.source import ModelSource, resolve
from ..text.tokenizer import Tokenizer
from .draft_model import DraftModel
from .make_runner import make_runner
from .params import EngineParams, SpeculationParams
from .prompt_lookup import PromptLookup
from .proposal_length import Costs
from .proposer import Proposer
from .ranks import SingleRank
from .runner import Runner
from .speculation import Speculator
from .step import DRAWN_BY_LEADER, SequenceStep

_log = logging.getLogger(__name__)
_KEY = "engine.speculation.draft_model"
_REPEATS = 5
_LEAST_ROW = 0.01  # of the fixed part: on a busy machine a row may seem to cost nothing


def start_speculation(params: SpeculationParams, engine: EngineParams, runner: Runner) -> Speculator | None:
    """None where nothing is to be proposed. All ranks of `runner` must be ready, and its pool not in use yet.

    Raises ConfigError for a draft model that cannot serve this one, before its weights are read.
    """
    if params.method == "none":
        return None
    proposer: Proposer
    if params.method == "draft":
        draft = _load_draft(params, engine)
        proposer, costs = DraftModel(draft, runner.vocab_size), draft_costs(runner, draft, params.max_tokens)
    else:
        row, fixed = _measure(runner, params.max_tokens + 1)
        proposer, costs = PromptLookup(), Costs(row / fixed, 0.0, 0.0)
    _log.info("speculation by %s: up to %d tokens; %s", params.method, params.max_tokens, costs)
    return Speculator(proposer, costs, params.max_tokens, engine.block_size, runner.guide.allowed)


def draft_costs(runner: Runner, draft: Runner, longest: int) -> Costs:
    """Measured, with up to `longest` proposals; neither pool may be in use."""
    row, fixed = _measure(runner, longest + 1)
    draft_row, draft_fixed = _measure(draft, longest + 1)
    return Costs(row / fixed, draft_fixed / fixed, draft_row / fixed)


def _load_draft(params: SpeculationParams, engine: EngineParams) -> Runner:
    try:
        source = resolve(params.draft_model)
        _compare(resolve(engine.model_path), source)
        own = replace(
            engine,
            model_path=params.draft_model,
            tensor_parallel=1,
            kv_blocks=None,
            kv_bytes=params.draft_kv_bytes,
            max_model_len=None,
        )
        runner = make_runner(own, SingleRank(), _no_progress, None)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {str(error).removeprefix('model.path: ')}") from error
    runner.warm_up()
    return runner


def _compare(served: ModelSource, draft: ModelSource) -> None:
    """Raises ConfigError unless both give every token id the same bytes: else proposals would mean something else."""
    one, other = Tokenizer.load(served), Tokenizer.load(draft)
    if one.vocab_size != other.vocab_size:
        raise ConfigError(
            f"{draft.name} has a tokenizer of {other.vocab_size} tokens and {served.name} one of {one.vocab_size}; a "
            "draft model must have the same tokenizer"
        )
    for token in range(one.vocab_size):
        if one.token_bytes(token) != other.token_bytes(token):
            raise ConfigError(
                f"token {token} is {other.token_bytes(token)!r} for {draft.name} and {one.token_bytes(token)!r} for "
                f"{served.name}; a draft model must have the same tokenizer"
            )


def _measure(runner: Runner, rows: int) -> tuple[float, float]:
    """(seconds that a further row of a step costs, seconds of a step without rows), the latter more than 0.

    From steps of 1 row and of `rows` rows, or as many as fit. Uses the first blocks, so only before the pool is in use.
    """
    rows = max(2, min(rows, runner.max_model_len, runner.blocks * runner.layout.block_size))
    one, many = _step_seconds(runner, 1), _step_seconds(runner, rows)
    row = max((many - one) / (rows - 1), _LEAST_ROW * one)
    return row, max(one - row, one / 10)


def _step_seconds(runner: Runner, rows: int) -> float:
    """The shortest of a few steps in which every row has logits that are drawn from."""
    blocks = list(range(block_count(rows, runner.layout.block_size)))
    draw = replace(DRAWN_BY_LEADER, choices=(0,))
    step = SequenceStep("", 0, 0, [0] * rows, 0, blocks, draw, proposed=rows - 1)
    return min(_timed(lambda: runner.decode([step])) for _ in range(_REPEATS))


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _no_progress(done: int, total: int) -> None:
    """The served model's progress stands for both."""
