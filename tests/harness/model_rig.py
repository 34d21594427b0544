"""A model with its pool, run directly: every position's logits, for any chunking, batch, block size and rank count."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from baton.engine.batch import BatchTensors
from baton.engine.model import Model
from baton.engine.model_config import ModelConfig, load_config
from baton.engine.paged_kv import PagedKV
from baton.engine.params import EngineParams, Quantization
from baton.engine.partition import head_ranges
from baton.engine.ranks import RankGroup, SingleRank
from baton.engine.step import SequenceStep
from baton.engine.weights import Weights
from baton.proto.kv_layout import KVLayout
from baton.text.source import resolve
from torch import Tensor

CPU = torch.device("cpu")


def silent(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def no_layers(low: int, high: int) -> None:
    """Nobody waits for layers."""


def engine_params(
    path: Path | str,
    dtype: str,
    block_size: int,
    ranks: int,
    batch_invariant: bool,
    layer_group: int,
    kv_dtype: str = "auto",
    quantization: Quantization = "none",
) -> EngineParams:
    """Parameters of a CPU engine with a small pool."""
    return EngineParams(
        model_path=str(path),
        dtype=dtype,
        quantization=quantization,
        sparsity="auto",
        device="cpu",
        threads=1,
        block_size=block_size,
        kv_blocks=64,
        kv_bytes=0,
        kv_dtype=kv_dtype,
        max_model_len=None,
        batch_invariant=batch_invariant,
        prefix_cache=False,
        layer_group=layer_group,
        tensor_parallel=ranks,
    )


class Meeting:
    """Where the threads that stand for ranks exchange tensors; each collective is summed in rank order."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadRank:
    """One thread's view of a Meeting, as a RankGroup."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in rank order."""
        parts = self._meeting.exchange(self.rank, tensor)
        tensor.copy_(torch.stack(parts).float().sum(0))

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Columns side by side on rank 0."""
        parts = self._meeting.exchange(self.rank, tensor)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1) if self.rank == 0 else tensor.new_empty(0, 0)

    def share(self, tensor: Tensor) -> None:
        """What rank 0 has."""
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])


class Rig:
    """`ranks` models over one checkpoint with a pool each."""

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        blocks: int = 64,
        ranks: int = 1,
        batch_invariant: bool = True,
        layer_group: int = 1,
        kv_dtype: str = "auto",
        quantization: Quantization = "none",
    ) -> None:
        source = resolve(str(path))
        self.config: ModelConfig = load_config(source)
        kind: torch.dtype = getattr(torch, dtype)
        params = engine_params(path, dtype, block_size, ranks, batch_invariant, layer_group, kv_dtype, quantization)
        meeting = Meeting(ranks)
        groups: list[RankGroup] = [ThreadRank(meeting, rank, ranks) for rank in range(ranks)]
        if ranks == 1:
            groups = [SingleRank()]
        self.weights = [
            Weights.open(source, self.config, kind, quantization, rank, ranks, silent) for rank in range(ranks)
        ]
        self.models = [Model(self.config, w, params, group) for w, group in zip(self.weights, groups, strict=True)]
        layout = KVLayout(
            self.weights[0].fingerprint,
            self.config.layers,
            self.config.kv_heads,
            self.config.head_dim,
            self.config.rope.describe(),
            dtype if kv_dtype == "auto" else kv_dtype,
            block_size,
            head_ranges(self.config.kv_heads, ranks),
        )
        self.pools = [PagedKV(layout, rank, blocks, CPU) for rank in range(ranks)]
        self.block_size = block_size

    def forward(self, steps: Sequence[SequenceStep], on_layers: Callable[[int, int], None] = no_layers) -> Tensor:
        """One step of all ranks: logits of every row."""
        batch = BatchTensors.build(steps, self.block_size, CPU)
        batch = dataclasses.replace(batch, logit_rows=torch.arange(len(batch.token_ids)))
        if len(self.models) == 1:
            return self.models[0].forward(batch, self.pools[0], on_layers).float()
        with ThreadPoolExecutor(len(self.models)) as threads:
            futures = [
                threads.submit(model.forward, batch, pool, on_layers)
                for model, pool in zip(self.models, self.pools, strict=True)
            ]
            results = [future.result(timeout=60) for future in futures]
        assert all(result.numel() == 0 for result in results[1:])
        return results[0].float()

    def sequence(self, tokens: Sequence[int], *, chunk: int | None = None, first_block: int = 0) -> Tensor:
        """Logits [len(tokens), vocab] of one sequence, in chunks of `chunk` tokens, in blocks from `first_block` on."""
        return torch.cat(
            [
                self.forward([self.step(tokens, start, start + (chunk or len(tokens)), first_block)])
                for start in range(0, len(tokens), chunk or len(tokens))
            ]
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens after `prompt`, without stopping; the prompt runs in chunks of 200."""
        tokens, start = [*prompt, *[0] * count], 0
        for at in range(len(prompt), len(tokens)):
            while start < at:
                stop = min(at, start + 200)
                logits = self.forward([self.step(tokens, start, stop)])[-1]
                start = stop
            tokens[at] = int(logits.argmax())
        return tokens[len(prompt) :]

    def step(self, tokens: Sequence[int], start: int, stop: int, first_block: int = 0) -> SequenceStep:
        """Tokens [start, stop) of a sequence; its blocks lie backwards from a high one, so order is never assumed."""
        stop = min(stop, len(tokens))
        need = -(-len(tokens) // self.block_size)
        blocks = [first_block + need - 1 - i for i in range(need)]
        return SequenceStep("r", 1, 0, list(tokens[start:stop]), start, blocks, None)


def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids that the same seed repeats."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocab, (count,), generator=generator)]


def assert_same_bits(ours: Tensor, expected: Tensor, what: str) -> None:
    """Equal in every bit; else says where the first row differs."""
    if not torch.equal(ours, expected):
        rows = (ours != expected).any(-1).nonzero().flatten().tolist()
        raise AssertionError(f"{what}: rows {rows[:8]} differ, by up to {float((ours - expected).abs().max())}")
