"""O-eq where the two pools or the wire differ: one engine reads the prompt, its KV is converted by a naive copy into
another engine's pool, and that one goes on. No transfer, no worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.step import Draw, SampledToken, SequenceStep
from baton.proto.kv_layout import block_count
from torch import Tensor

from .kv_convert import naive
from .monolithic import sampling
from .worker_rig import engine_params

_BLOCK = 8


class HandOver:
    """Two engines over one model. `chunk` is the prefill worker's: in float32 the bits depend on it."""

    def __init__(
        self, model: Path | str, dtype: str, kv_dtypes: tuple[str, str], chunk: int = 16, blocks: int = 40
    ) -> None:
        self.chunk, self.blocks = chunk, blocks
        self.prefill, self.decode = (
            Runner(
                engine_params(Path(model), dtype=dtype, kv_dtype=kind, block_size=_BLOCK, kv_blocks=blocks),
                SingleRank(),
                lambda done, total: None,
                None,
            )
            for kind in kv_dtypes
        )

    def run(
        self, prompt: Sequence[int], count: int, codec: str = "raw", logprobs: int | None = None
    ) -> list[SampledToken]:
        """`count` greedy tokens after `prompt`."""
        first, kv = self.read(prompt, count, logprobs)
        return self.go_on(prompt, [first], naive(kv, codec, self.decode.layout.dtype), count, logprobs)

    def read(self, prompt: Sequence[int], count: int, logprobs: int | None = None) -> tuple[SampledToken, Tensor]:
        """The first token, and the prompt's KV [layers, 2, heads, tokens, head_dim] as the prefill pool has it."""
        draw = Draw(sampling(max_tokens=count, logprobs=logprobs), (0,), prompt, [])
        drawn: list[list[SampledToken]] = []
        for start in range(0, len(prompt), self.chunk):
            stop = min(start + self.chunk, len(prompt))
            last = draw if stop == len(prompt) else None
            step = SequenceStep("r", 1, 0, prompt[start:stop], start, self._blocks(0), last)
            drawn = self.prefill.prefill([step], lambda low, high: None)
        return drawn[0][0], self.prefill.kv.gather(self._blocks(0), *self._all(len(prompt)))

    def go_on(
        self,
        prompt: Sequence[int],
        first: Sequence[SampledToken],
        kv: Tensor,
        count: int,
        logprobs: int | None = None,
        forced: Sequence[int] = (),
    ) -> list[SampledToken]:
        """The other tokens, from KV of the decode pool's dtype. Where `forced` says what was said, that is read."""
        params = sampling(max_tokens=count, logprobs=logprobs)
        self.decode.kv.scatter(self._blocks(1), *self._all(len(prompt)), kv)
        out = list(first)
        while len(out) < count:
            said = list(forced[: len(out)]) or [token.token_id for token in out]
            draw = Draw(params, (0,), prompt, said)
            step = SequenceStep("r", 1, 0, said[-1:], len(prompt) + len(said) - 1, self._blocks(1), draw)
            out += self.decode.decode([step])[0]
        return out

    def _all(self, tokens: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        layout = self.prefill.layout
        if block_count(tokens, _BLOCK) > self.blocks:
            raise ValueError(f"{tokens} tokens in {self.blocks} blocks of {_BLOCK}")
        return (0, layout.layers), (0, layout.kv_heads), (0, tokens)

    def _blocks(self, side: int) -> list[int]:
        return list(range(self.blocks))[:: -1 if side else 1]
