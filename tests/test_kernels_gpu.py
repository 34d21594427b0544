"""Kernels for GPUs: what can be said of them without Triton, and (slow) that `make kernels` finds errors in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from baton.tests.gpu.mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = mutations()


def test_every_kernel_has_errors_to_find() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert all(mutation.source() for mutation in MUTATIONS)
    kernels = {path.name for path in (ROOT / "kernels" / "gpu").glob("*.py") if "@triton.jit" in path.read_text()}
    assert kernels <= {mutation.file for mutation in MUTATIONS}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_an_error_is_found(mutation: Mutation) -> None:
    assert mutation.is_found()


IMPORT_ALL = """
import importlib, pathlib, sys
import baton
root = pathlib.Path(baton.__path__[0])
for room in ("cluster", "decode_worker", "engine", "kernels", "kv_transfer", "prefill_worker", "router", "text"):
    for path in sorted((root / room).glob("*.py")):
        importlib.import_module(f"baton.{room}.{path.stem}")
print(*(name for name in sys.modules if name.split(".")[0] == "triton"))
"""


def test_the_product_loads_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not done.stdout.strip()
