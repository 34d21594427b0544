"""Kernels for GPUs, on a GPU or, where there is none, in Triton's interpreter: `make kernels`."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Triton reads the variable when a kernel is defined, so a process either interprets or compiles: `make test` does
# neither where there is no GPU.
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")
