"""A choice that a stop string ended leaves the decode worker's batch while its siblings go on: ST-08."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.tests.harness.gates import Gates
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import chain, write_scripted_model

CYCLE = chain(*b"?ACA") | chain(*b"BA")
BIAS = {ord("B"): 5.0}  # some 4 below the cycle's next token: B comes once in about 50 tokens
TOKENS = 90


def running_sequences(rig: Rig) -> float:
    return sum(rig.metrics()["baton_decode_running_requests"].values())


def two_choices_that_say_b_far_apart(rig: Rig) -> tuple[dict[str, Any], list[str], list[int]]:
    """The request, what its choices say up to their first B, and how many tokens that is."""
    for seed in range(50):
        request: dict[str, Any] = {"prompt": "?", "n": 2, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True}
        request |= {"temperature": 1.0, "logit_bias": BIAS}
        choices = rig.client.generate(**request).choices
        before_b = [[*choice.token_ids, ord("B")].index(ord("B")) for choice in choices]
        if abs(before_b[0] - before_b[1]) >= 30:
            return request, [choice.text.partition("B")[0] for choice in choices], before_b
    raise AssertionError("no seed keeps the choices apart")


def test_st_08_a_stopped_choice_leaves_the_batch_at_once(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path / "scripted", CYCLE)
    config = tiny_config(model)
    memory = 2 * config["pools"]["decode"]["memory"]
    gates = Gates(tmp_path / "gates", {"decode.step": "gate"})
    with running(tmp_path / "rig", merged(config, {"pools.decode.memory": memory}), gates) as rig:
        request, texts, before_b = two_choices_that_say_b_far_apart(rig)
        first = before_b.index(min(before_b))
        gates.close("decode.step")
        stream = rig.client.stream(**request, stop=["B"])
        for _ in range(before_b[first]):  # prefill says the first token, and the B is one more
            gates.wait_reached("decode.step")
            gates.let_one("decode.step")
        for answer in stream:
            if answer.choices[first].reason:
                break
        for _ in range(20):  # of at least 30 that the other has before it
            gates.wait_reached("decode.step")
            if running_sequences(rig) == 1:
                break
            gates.let_one("decode.step")
        assert running_sequences(rig) == 1
        gates.release("decode.step")
        answer = stream.rest()
        assert [choice.text for choice in answer.choices] == texts
        assert answer.choices[first].matched_stop == "B"
