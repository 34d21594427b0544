"""A stop string ends one choice of several: its decode worker is told, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from baton.tests.harness.router_rig import router_rig


@pytest.mark.parametrize("at", [0, 3])  # on the token that prefill sampled, and on one of decode's
async def test_a_stopped_choice_is_ended_at_decode(tmp_path: Path, at: int) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        rig.cluster.script = lambda leg, choice, index: ord("b") if (choice, index) == (1, at) else ord("a")
        decode = rig.cluster["decode-0"]
        decode.step_s = 0.01
        answer = await rig.generate(prompt="x", n=3, max_tokens=30, stop=["b"])
        assert answer.texts == {0: "a" * 30, 1: "a" * at, 2: "a" * 30}
        assert answer.reasons == {0: "length", 1: "stop", 2: "length"}
        assert list(decode.ended.values()) == [{1}]
        assert answer.finished[-1].usage.completion_tokens == 60 + at + 1
