"""The same tokens and logprobs with and without speculation, bit for bit: lookup and draft model, greedy and sampled.

bfloat16 with batch invariance, so a row's bits do not depend on the rows that come with it; in float32 tokens alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from baton.engine.block_pool import BlockPool
from baton.engine.draft_model import DraftModel
from baton.engine.local import LocalChoice, LocalEngine, Request
from baton.engine.params import SpeculationParams
from baton.engine.prompt_lookup import PromptLookup
from baton.engine.proposal_length import Costs
from baton.engine.proposer import Proposer, Wanted
from baton.engine.runner import Runner
from baton.engine.speculation import Speculator
from baton.engine.speculation_start import start_speculation
from baton.engine.step import Draw
from baton.proto.errors import ConfigError
from baton.tests.harness.monolithic import sampling
from baton.tests.harness.ranks import leader
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.test_engine_runner import build, engine_params

FREE = Costs(0.0, 0.0, 0.0)
PROPOSERS = ["prompt_lookup", "the same model", "another model"]


def mixed(count: int = 24) -> list[Request]:
    """Prompts that repeat themselves, and every kind of sampling."""
    rng = random.Random(2)
    period = [rng.randrange(250) for _ in range(5)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.6, "top_p": 0.8, "logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.9, "presence_penalty": 0.5, "logit_bias": {7: 4.0}, "top_k": 12},
        {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 320, 3))},
        {"logprobs": 3, "stop_token_ids": frozenset(range(0, 320, 5))},
    ]
    return [
        (period * rng.randint(1, 5) + [index], sampling(seed=index, max_tokens=rng.randint(1, 40), **kinds[index % 7]))
        for index in range(count)
    ]


def proposer(name: str, model: Path, other: Path, served: Runner) -> Proposer:
    if name == "prompt_lookup":
        return PromptLookup()
    path = model if name == "the same model" else other
    draft = build(path, dtype=served.layout.dtype, kv_blocks=40, block_size=8)
    return DraftModel(draft, served.vocab_size)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("other") / "draft", seed=5, layers=1)


@pytest.fixture(scope="module")
def served(tiny_dir: Path) -> Runner:
    """The model that is served."""
    return build(tiny_dir, dtype="bfloat16", kv_blocks=200)


@pytest.fixture(scope="module")
def expected(served: Runner) -> list[list[LocalChoice]]:
    """What it says without speculation."""
    pool = BlockPool(200, 4, True)
    return LocalEngine(served, pool, served.kv.copy_blocks).generate(mixed(), 64, 8)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("blocks", [200, 24], ids=["roomy", "preemption"])
def test_proposals_change_no_token_and_no_logprob(
    tiny_dir: Path, other: Path, served: Runner, expected: list[list[LocalChoice]], name: str, blocks: int
) -> None:
    guesses = proposer(name, tiny_dir, other, served)
    speculator = Speculator(guesses, FREE, 6, 4)
    pool = BlockPool(blocks, 4, True)
    engine = LocalEngine(served, pool, served.kv.copy_blocks, speculator)
    found = engine.generate(mixed(), 24, 6)
    assert found == expected
    assert (engine.preemptions > 0) == (blocks < 200)
    assert speculator.draft_tokens > speculator.accepted_tokens * (name != "the same model")
    assert speculator.accepted_tokens > (200 if name == "the same model" else 0)
    pool.check()
    speculator.lengths([])
    assert (pool.used, draft_pool_use(guesses)) == (0, 0)


def draft_pool_use(guesses: Proposer) -> int:
    """Blocks of the draft model that somebody refers to."""
    return guesses._pool.used if isinstance(guesses, DraftModel) else 0


def test_a_stream_that_is_closed_early_leaves_nothing(tiny_dir: Path, other: Path, served: Runner) -> None:
    speculator = Speculator(proposer("the same model", tiny_dir, other, served), FREE, 6, 4)
    pool = BlockPool(64, 4, True)
    engine = LocalEngine(served, pool, served.kv.copy_blocks, speculator)
    prompt, params = mixed()[0][0], sampling(max_tokens=40)
    whole = [token.token_id for token in engine.stream(prompt, params, 64)]
    stream = engine.stream(prompt, params, 64)
    assert [next(stream).token_id for _ in range(9)] == whole[:9]
    stream.close()
    assert (len(whole), pool.used) == (40, 0)


def test_two_ranks_follow_proposals(tmp_path: Path) -> None:
    """Real gloo processes: the followers run the proposals and return as many rows of logits."""
    path = write_tiny_model(tmp_path / "model", heads=4, kv_heads=2)
    alone = build(path)
    expected = LocalEngine(alone, BlockPool(32, 4, True), alone.kv.copy_blocks).generate(mixed(8), 16, 8)
    with leader(engine_params(path, tensor_parallel=2)) as group:
        speculator = Speculator(DraftModel(build(path, kv_blocks=80), 320), FREE, 4, 4)
        engine = LocalEngine(group.runner, BlockPool(32, 4, True), group.copy_blocks, speculator)
        found = engine.generate(mixed(8), 16, 8)
    ids = [[choice.token_ids for choice in choices] for choices in found]
    assert ids == [[choice.token_ids for choice in choices] for choices in expected]
    assert speculator.accepted_tokens > 50


def ask(draft: DraftModel, prompt: list[int], count: int, name: str = "q") -> list[int]:
    ((*guesses,),) = draft.propose([Wanted(((name, 1, 0), 0), Draw(sampling(), (0,), prompt, [1]), count)])
    return guesses


def test_a_draft_model_without_room_proposes_less(tiny_dir: Path) -> None:
    """A pool of two blocks and a context of 16 tokens."""
    draft = DraftModel(build(tiny_dir, kv_blocks=2, block_size=8, max_model_len=16), 320)
    assert len(ask(draft, [5, 6], 4)) == 4
    assert ask(draft, list(range(20)), 4, "too long") == []
    assert ask(draft, list(range(7)), 9, "the pool is full") == []
    draft.keep([])
    assert len(ask(draft, list(range(12)), 9)) == 3  # 13 tokens are known, the context has 16


def test_tokens_that_only_one_of_the_models_has_are_not_proposed_or_read(tiny_dir: Path) -> None:
    draft = DraftModel(build(tiny_dir), 320)
    whole = ask(draft, [5, 6], 6)
    narrow = DraftModel(build(tiny_dir), max(whole))
    assert ask(narrow, [5, 6], 6) == whole[: whole.index(max(whole))]
    assert ask(narrow, [max(whole), 5], 3, "foreign") == []


def test_a_new_long_sequence_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "long", max_len=1024)
    draft = DraftModel(build(path, kv_blocks=80, block_size=16), 320)
    wanted = Wanted((("q", 1, 0), 0), Draw(sampling(), (0,), [index % 250 for index in range(600)], [1]), 3)
    assert [len(draft.propose([wanted])[0]) for _ in range(4)] == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("vocab", "message"),
    [(300, "has a tokenizer of"), (0, "engine.speculation.draft_model: 'nowhere' is neither a bundled name")],
)
def test_a_draft_model_that_cannot_serve_is_refused(
    tmp_path: Path, tiny_dir: Path, vocab: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_tiny_model(tmp_path / "small", vocab=vocab)) if vocab else "nowhere"
    served = build(tiny_dir)
    monkeypatch.setattr("baton.engine.runner.Model", None)  # no weights are read
    params = SpeculationParams("draft", 4, path, 1 << 20)
    with pytest.raises(ConfigError, match=message) as caught:
        start_speculation(params, engine_params(tiny_dir), served)
    assert str(caught.value).startswith("engine.speculation.draft_model: ")


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "draft"])
def test_speculation_starts_as_it_is_asked_for(tiny_dir: Path, other: Path, method: Any) -> None:
    params = SpeculationParams(method, 4, str(other), 1 << 20)
    speculator = start_speculation(params, engine_params(tiny_dir), build(tiny_dir))
    assert (speculator is None) == (method == "none")
    if speculator is not None:
        assert speculator.lengths([(("q", 1, 0), 0)]) is not None
