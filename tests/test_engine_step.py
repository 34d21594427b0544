"""Step plans on the wire, and the tensors of a batch."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
import torch
from baton.engine.batch import BatchTensors
from baton.engine.step import DRAWN_BY_LEADER, Draw, SequenceStep, pack_plan, unpack_plan

CPU = torch.device("cpu")
DRAW = Draw(DRAWN_BY_LEADER.params, (0,), [1, 2, 3], [4])
STEPS = [
    SequenceStep("a", 1, 0, [7, 8, 9], 3, [4, 0], None),
    SequenceStep("b", 2, 5, [6], 7, [2, 9], DRAW),
    SequenceStep("c", 0, 0, [1, 2], 0, [1], DRAW),
]


def test_a_plan_survives_the_wire_without_its_draws() -> None:
    kind, steps = unpack_plan(pack_plan("prefill", STEPS))
    assert kind == "prefill"
    assert steps == [dataclasses.replace(step, draw=None if step.draw is None else DRAWN_BY_LEADER) for step in STEPS]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(["prefill"]),
        msgpack.packb(["rest", []]),
        msgpack.packb(["decode", [[1, 2]]]),
        msgpack.packb(5),
        msgpack.packb(["decode", []]) + b"\x00",
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a step plan"):
        unpack_plan(data)


def test_a_batch_lays_sequences_end_to_end() -> None:
    batch = BatchTensors.build(STEPS, 4, CPU)
    assert batch.token_ids.tolist() == [7, 8, 9, 6, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 7, 0, 1]
    assert batch.slots.tolist() == [4 * 4 + 3, 0, 1, 9 * 4 + 3, 4, 5]
    assert batch.cu_seqlens == [0, 3, 4, 6]
    assert batch.context_lens == [6, 8, 2]
    assert batch.block_tables == [[4, 0], [2, 9], [1]]
    assert batch.logit_rows.tolist() == [3, 5]


def test_a_batch_needs_tokens_and_blocks() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        BatchTensors.build([SequenceStep("a", 0, 0, [], 0, [1], None)], 4, CPU)
    with pytest.raises(ValueError, match="2 tokens from 3 in 1 blocks of 4"):
        BatchTensors.build([SequenceStep("a", 0, 0, [1, 2], 3, [1], None)], 4, CPU)
