"""KV-07: what a transfer is called is said by the router alone, and is the same at every worker.

Two routers use one prefill and one decode worker at the same time, with requests of several choices and attempts whose
numbers are equal; nothing in the workers tells them apart but the ids that the routers minted.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_crew import Crew, crew
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params, session
from baton.tests.harness.worker_router import Answer, leg_message

SAMPLED: dict[str, Any] = {"n": 3, "temperature": 1.0, "max_tokens": 8}


def prompt_of(router: int, number: int) -> list[int]:
    """All alike for a while, then their own."""
    return [7, 11, 13, 17, 19, *((31 * router + 7 * number + 3 * index) % 250 for index in range(9 + number))]


async def test_kv_07_two_routers_and_choices_share_workers(tiny_dir: Path) -> None:
    alone = Monolithic(tiny_dir)
    engine = engine_params(tiny_dir, kv_blocks=128)
    async with crew(prefill_params(engine), decode_params(engine)) as first, AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(session(worker)) for worker in first.workers]
        routers = [first, Crew(sides[0], sides[1:], first.workers)]

        async def served(router: int, number: int) -> Answer:
            crew_, answer = routers[router], Answer()
            leg = leg_message(prompt_of(router, number), sampling(**SAMPLED, seed=router * 10 + number))
            await crew_.start(leg, crew_.decodes[0])
            await crew_.finish(leg, crew_.prefill, crew_.decodes[0], answer)
            return answer

        asked = [(router, number) for number in range(3) for router in range(2)]
        answers = await asyncio.gather(*(served(*one) for one in asked))
    for (router, number), answer in zip(asked, answers, strict=True):
        expected = alone.run(prompt_of(router, number), **SAMPLED, seed=router * 10 + number)
        assert [answer.ids(choice) for choice in sorted(answer.tokens)] == [choice.token_ids for choice in expected]
