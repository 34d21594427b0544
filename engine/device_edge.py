"""What the GPU path needs of a device beside kernels: streams, events, graphs and page-locked memory, in one place.

`CudaEdge` is a GPU. `HostEdge` runs the same code on CPU tensors: everything queued is done at once, and a captured
function is called each time, so that the whole forward pass is executed as it is written, only without a GPU
(kernels: in Triton's interpreter).

A step is *queued* on one stream; nothing in it waits for the device. Who wants results copies them back, sets a mark
behind the copy and waits for that. Transfer threads work *beside* it, each on a stream of its own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGN = 16  # bytes: what kernels load at once


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Returns when the device has done everything that was queued before it."""
        ...


class Edge(Protocol):
    """A device as a step sees it."""

    device: torch.device
    captures: bool  # whether `capture` saves anything

    def queue(self) -> AbstractContextManager[None]:
        """Inside, work goes to the steps' stream, in order."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Inside, work goes to this thread's own stream; on leaving it is done."""
        ...

    def mark(self) -> Mark:
        """Behind all that was queued on the current stream."""
        ...

    def page_locked(self, size: int) -> Tensor:
        """uint8 [size] in memory of the host that copies run from and to beside it; freed only behind those copies."""
        ...

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`run` as one launch, whose result is always the same tensor. It may only read and write tensors that stay,
        and was called once before, so that nothing is left to compile."""
        ...


class _Done:
    def wait(self) -> None:
        """It is."""


class HostEdge:
    """The same on CPU tensors."""

    device = torch.device("cpu")
    captures = False

    def queue(self) -> AbstractContextManager[None]:
        """Everything is done at once."""
        return contextlib.nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Everything is done at once."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """Everything is done."""
        return _Done()

    def page_locked(self, size: int) -> Tensor:
        """Any memory."""
        return torch.empty(size, dtype=torch.uint8)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The function itself."""
        return run


class CudaEdge:
    """The current CUDA device, which must exist."""

    captures = True

    def __init__(self) -> None:
        cuda: Any = torch.cuda
        self.device = torch.device("cuda", cuda.current_device())
        self._steps = cuda.Stream(self.device)
        self._own = threading.local()
        self._memory = cuda.graph_pool_handle()  # of all graphs: one runs at a time

    def queue(self) -> AbstractContextManager[None]:
        """See Edge."""
        scope: AbstractContextManager[None] = torch.cuda.stream(self._steps)
        return scope

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See Edge."""
        cuda: Any = torch.cuda
        if not hasattr(self._own, "stream"):
            cuda.set_device(self.device)
            self._own.stream = cuda.Stream(self.device)
        self._own.stream.wait_stream(cuda.current_stream(self.device))  # what the thread has queued before
        with cuda.stream(self._own.stream):
            try:
                yield
            finally:
                self._own.stream.synchronize()

    def mark(self) -> Mark:
        """See Edge."""
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return _Event(event)

    def page_locked(self, size: int) -> Tensor:
        """See Edge: torch keeps such memory until the copies that were queued from it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Edge. Other threads may use the device meanwhile."""
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._steps, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Sleep until then; other threads go on."""
        self._event.synchronize()


def upload(edge: Edge, parts: Sequence[Tensor], out: Tensor | None = None) -> list[Tensor]:
    """Tensors of the host on the device, by one queued copy: views of `out` (uint8, large enough) or of new memory."""
    starts, size = _places([part.nbytes for part in parts])
    staging = edge.page_locked(size)
    for start, part in zip(starts, parts, strict=True):
        _piece(staging, start, part).copy_(part)
    target = torch.empty(size, dtype=torch.uint8, device=edge.device) if out is None else out[:size]
    target.copy_(staging, non_blocking=True)
    return [_piece(target, start, part) for start, part in zip(starts, parts, strict=True)]


def packed_bytes(sizes: Sequence[int]) -> int:
    """What `upload` takes for parts of these sizes."""
    return _places(sizes)[1]


def views(memory: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Where `upload` into `memory` puts parts of the shapes and dtypes of these."""
    starts, _ = _places([part.nbytes for part in parts])
    return [_piece(memory, start, part) for start, part in zip(starts, parts, strict=True)]


class Download:
    """Tensors on their way to the host; the copy is queued when this is made."""

    def __init__(self, edge: Edge, parts: Sequence[Tensor]) -> None:
        starts, size = _places([part.nbytes for part in parts])
        near = torch.empty(size, dtype=torch.uint8, device=edge.device)
        for start, part in zip(starts, parts, strict=True):
            _piece(near, start, part).copy_(part)
        memory = edge.page_locked(size)
        memory.copy_(near, non_blocking=True)
        self._parts = [_piece(memory, start, part) for start, part in zip(starts, parts, strict=True)]
        self._mark = edge.mark()

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        self._mark.wait()
        return self._parts


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return starts, end


def _piece(memory: Tensor, start: int, like: Tensor) -> Tensor:
    size = math.prod(like.shape) * like.dtype.itemsize
    return memory[start : start + size].view(like.dtype).view(like.shape)
