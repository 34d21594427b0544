"""What the sections of benchmarks/gpu.py share: where they run, how they time, and a row of the report."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from baton.engine.device_edge import CudaEdge, Edge, HostEdge

_GROUPS = 3
_HEAD_START = 20_000_000  # cycles: about 10 ms


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model whose steps are measured."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    model: Shape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    copied: int  # bytes of the copy that all bandwidths are shares of
    square: int  # rows and columns of the product that all FLOP rates are shares of
    tokens: int  # of elementwise kernels, and of a transfer
    repeats: int
    pool_tokens: int


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
FULL = Sizes(
    LLAMA_8B, (1, 8, 32, 64, 128, 256), (1024, 8192, 32768), (2048, 8192), 1 << 30, 8192, 32768, 10, 320 * 1024
)
QUICK = Sizes(LLAMA_8B, (1, 64), (1024, 8192), (2048,), 1 << 30, 8192, 16384, 5, 320 * 1024)
_TINY_SHAPE = Shape(2, 64, 128, 4, 2, 16, 320)
TINY = Sizes(_TINY_SHAPE, (1, 2), (20,), (12,), 1 << 16, 64, 8, 1, 512)


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `share`: of what the machine was measured to give; `target`: what it should be; None: no such thing."""

    section: str
    name: str
    case: str
    seconds: float | None
    figure: float
    unit: str
    share: float | None = None
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met."""
        return None if self.target is None or self.share is None else self.share >= self.target


def failure(section: str, name: str, reason: str) -> Row:
    """Something that gave no figure."""
    return Row(section, name, reason, None, 0.0, "failed", 0.0, 1.0)


def each(section: str, parts: Iterable[tuple[str, Callable[[], Iterable[Row]]]]) -> Iterator[Row]:
    """The rows of all parts; one that raises costs its own."""
    for name, part in parts:
        try:
            yield from part()
        except Exception as error:
            traceback.print_exc()
            text = (str(error).strip() or "no message").splitlines()[0]
            yield failure(section, name, f"{type(error).__name__}: {text:.100}")


@dataclass(slots=True)
class Setup:
    """A device. `bandwidth` and `flops` are measured first; kernels run in `half`, models in `model_dtype`."""

    edge: Edge
    sizes: Sizes
    half: torch.dtype
    model_dtype: torch.dtype
    bandwidth: float = 1.0  # bytes per second of a copy: read and written
    flops: float = 1.0

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return self.edge.device

    @property
    def on_gpu(self) -> bool:
        """Whether speeds mean anything."""
        return self.device.type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.half)

    def wait(self) -> None:
        """For everything that was queued."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def let_go(self) -> None:
        """Of the memory that nobody uses any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of one call on the device, with what it needs compiled before: the median of some groups of calls."""
        run()
        self.wait()
        if not self.on_gpu:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        cuda: Any = torch.cuda
        found: list[float] = []
        for _ in range(_GROUPS):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(_HEAD_START)  # meanwhile the host queues, so that its own time is not measured
            start.record()
            for _ in range(self.sizes.repeats):
                run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / self.sizes.repeats)
        return sorted(found)[_GROUPS // 2]

    def by_bytes(
        self, section: str, name: str, case: str, run: Callable[[], Any], size: float, target: float | None
    ) -> Row:
        """A row for something that moves `size` bytes."""
        seconds = self.seconds(run)
        rate = size / seconds
        return Row(section, name, case, seconds, rate / 1e9, "GB/s", rate / self.bandwidth, target)

    def by_flops(
        self, section: str, name: str, case: str, run: Callable[[], Any], work: float, target: float | None
    ) -> Row:
        """A row for something that needs `work` operations."""
        seconds = self.seconds(run)
        rate = work / seconds
        return Row(section, name, case, seconds, rate / 1e12, "TFLOP/s", rate / self.flops, target)


def setup(device: str, quick: bool) -> Setup:
    """Of this process. In the interpreter bfloat16 is not right: float16 and float32 stand in for it."""
    if device == "cpu":
        return Setup(HostEdge(), TINY, torch.float16, torch.float32)
    return Setup(CudaEdge(), QUICK if quick else FULL, torch.bfloat16, torch.bfloat16)


def machine(at: Setup) -> list[Row]:
    """A copy and a product: what everything else is a share of."""
    source = torch.zeros(at.sizes.copied, dtype=torch.uint8, device=at.device)
    target = torch.empty_like(source)
    seconds = at.seconds(lambda: target.copy_(source))
    at.bandwidth = 2 * at.sizes.copied / seconds
    copy = Row("machine", "copy", f"{at.sizes.copied} B", seconds, at.bandwidth / 1e9, "GB/s")
    side = at.sizes.square
    a, b = at.normal(side, side), at.normal(side, side)
    seconds = at.seconds(lambda: a @ b)
    at.flops = 2.0 * side**3 / seconds
    return [copy, Row("machine", "matmul", f"{side}^3", seconds, at.flops / 1e12, "TFLOP/s")]
