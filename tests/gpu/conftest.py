"""Kernels for GPUs, on a GPU or, where there is none, in Triton's interpreter: `make kernels`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Triton reads the variable when a kernel is defined, so a process either interprets or compiles: `make test` does
# neither where there is no GPU.
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def _exact_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A dot product whose rows do not depend on where they stand: the interpreter's own is numpy's in float32, and some
    processors' libraries sum the rows at the end of a matrix in another order."""
    from triton.runtime import interpreter

    eight_bits = [x for x in (a, b) if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating()]
    if eight_bits:
        return _own_dot(builder, a, b, d, input_precision, max_num_imprecise_acc)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


if INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder

    _own_dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = _exact_dot


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")
