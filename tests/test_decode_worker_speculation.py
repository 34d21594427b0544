"""Live decode workers that speculate, one rank and two: the same tokens under preemption, choices and cancels."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from baton.engine.params import SpeculationParams
from baton.engine.proposal_length import Costs
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import leg_message, pair


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle, which does not speculate."""
    return Monolithic(tiny_dir)


@pytest.fixture(autouse=True)
def _proposals_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured, a draft model as large as the served one is not worth asking."""
    free = Costs(0.0, 0.0, 0.0)
    monkeypatch.setattr("baton.engine.speculation_start.draft_costs", lambda runner, draft, longest: free)


def prompt_of(length: int, start: int) -> list[int]:
    """Repeats itself after seven tokens."""
    return [(start * 17 + 13 * (index % 7)) % 250 for index in range(length)]


def speculation(method: Any, model: Path) -> SpeculationParams:
    return SpeculationParams(method, 5, str(model) if method == "draft" else "", 1 << 20)


@pytest.mark.parametrize(("ranks", "method"), [(1, "prompt_lookup"), (2, "prompt_lookup"), (1, "draft"), (2, "draft")])
async def test_a_full_pool_and_proposals_change_no_token(
    tiny_dir: Path, alone: Monolithic, ranks: int, method: str
) -> None:
    """The draft model is the served one, so all that it proposes is accepted."""
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 4, "n": 2}, {"repetition_penalty": 1.2}]
    asked = [
        (prompt_of(rng.randint(1, 20), index), {"max_tokens": rng.randint(2, 30), **kinds[index % 3]})
        for index in range(15)
    ]
    decode = engine_params(tiny_dir, kv_blocks=20, tensor_parallel=ranks)
    params = decode_params(decode, reserve_wait_s=60.0, speculation=speculation(method, tiny_dir))
    async with pair(prefill_params(engine_params(tiny_dir)), params) as router:
        answers = await asyncio.gather(*(router.generate(prompt, sampling(**how)) for prompt, how in asked))
        load = router.decode.load
        assert load.preemptions > 0
        assert load.spec_draft_tokens >= load.spec_drafts > 0
        if method == "draft":
            assert load.spec_accepted_tokens == load.spec_draft_tokens
            said = sum(len(answer.ids(choice)) for answer in answers for choice in answer.tokens)
            assert load.spec_accepted_tokens > said / 3
    for (prompt, how), answer in zip(asked, answers, strict=True):
        expected = alone.run(prompt, **how)
        assert [answer.ids(number) for number in range(len(expected))] == [choice.token_ids for choice in expected]


@pytest.mark.parametrize("method", ["prompt_lookup", "draft"])
async def test_cancels_leave_no_block_and_the_worker_goes_on(tiny_dir: Path, alone: Monolithic, method: str) -> None:
    rng = random.Random(3)
    decode = engine_params(tiny_dir, kv_blocks=256)
    params = decode_params(decode, speculation=speculation(method, tiny_dir))
    async with pair(prefill_params(engine_params(tiny_dir)), params) as router:

        async def one(number: int) -> None:
            leg = leg_message(prompt_of(rng.randint(1, 40), number), sampling(max_tokens=60))
            await router.run_and_cancel(leg, rng.random() * 0.2)

        for wave in range(2):
            await asyncio.gather(*(one(10 * wave + number) for number in range(8)))
            await router.prefill.wait_idle()
            await router.decode.wait_idle()
        prompt = prompt_of(20, 99)
        answer = await router.generate(prompt, sampling(max_tokens=30))
        assert answer.ids() == alone.run(prompt, max_tokens=30)[0].token_ids
