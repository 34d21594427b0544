"""O-eq's second oracle: the same engine in one process, without transfer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.engine.block_pool import BlockPool
from baton.engine.local import LocalChoice, LocalEngine
from baton.engine.params import EngineParams
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.proto.sampling import SamplingParams

GREEDY = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    seed=0,
    n=1,
    max_tokens=16,
    min_tokens=0,
    stop_token_ids=frozenset(),
    logprobs=None,
)


def sampling(**changes: Any) -> SamplingParams:
    """Greedy, 16 tokens, never ended by a token; with these changes."""
    return dataclasses.replace(GREEDY, **changes)


class Monolithic:
    """One local engine; another block size, chunk and batch than the cluster's must not change its answers."""

    def __init__(
        self,
        model: str | Path,
        dtype: str = "float32",
        block_size: int = 16,
        blocks: int = 256,
        kv_dtype: str = "auto",
    ) -> None:
        params = EngineParams(
            model_path=str(model),
            dtype=dtype,
            quantization="none",
            sparsity="auto",
            device="cpu",
            threads=1,
            block_size=block_size,
            kv_blocks=blocks,
            kv_bytes=0,
            kv_dtype=kv_dtype,
            max_model_len=None,
            batch_invariant=True,
            prefix_cache=False,
            layer_group=1,
            tensor_parallel=1,
        )
        runner = Runner(params, SingleRank(), lambda done, total: None, None)
        self._engine = LocalEngine(runner, BlockPool(blocks, block_size, False), runner.kv.copy_blocks)

    def run(self, prompt: Sequence[int], **changes: Any) -> list[LocalChoice]:
        """All choices of one request; `changes` are to `sampling`."""
        ((*choices,),) = self._engine.generate([(list(prompt), sampling(**changes))], chunk=512, max_sequences=16)
        return choices
