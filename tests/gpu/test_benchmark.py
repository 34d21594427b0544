"""benchmarks/gpu.py without a GPU: every section runs, its numbers are right, and it says what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from baton.tests.gpu.conftest import INTERPRETED

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
SECTIONS = {"machine", "numbers", "kernel", "torch", "decode", "prefill", "host", "pair"}


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: run it in full")
def test_every_section_runs(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, SCRIPT, "--device", "cpu", "--json", found], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(found.read_text())["rows"]
    assert {row["section"] for row in rows} == SECTIONS
    assert all(row["met"] for row in rows if row["section"] == "numbers")
    assert all(row["figure"] > 0 for row in rows if row["section"] in ("kernel", "decode", "prefill"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
