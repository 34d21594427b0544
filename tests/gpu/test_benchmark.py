"""benchmarks/gpu.py without a GPU: every section runs, its numbers are right, and it says what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from baton.benchmarks import gpu
from baton.benchmarks.gpu_setup import Row, each, failure
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


def test_a_part_that_fails_costs_its_own_rows() -> None:
    good = Row("kernel", "good", "", 1.0, 1.0, "GB/s")

    def bad() -> Iterator[Row]:
        yield good
        raise RuntimeError("no such instruction\nand more")

    rows = list(each("kernel", [("bad", bad), ("next", lambda: [good])]))
    assert rows == [good, failure("kernel", "bad", "RuntimeError: no such instruction"), good]
    assert rows[1].met is False


@pytest.mark.parametrize(
    ("ending", "limit", "reason"),
    [("os._exit(3)", 60.0, "exit status 3"), ("time.sleep(60)", 3.0, "ended after 3 s"), ("pass", 60.0, "")],
)
def test_a_section_that_crashes_or_hangs_keeps_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, limit: float, reason: str
) -> None:
    row = Row("numbers", "first", "", None, 0.0, "error", 1.0, 1.0)
    script = tmp_path / "section.py"
    script.write_text(f"import os, time\nprint('noise')\nprint({json.dumps(asdict(row))!r}, flush=True)\n{ending}\n")
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setitem(gpu.SECTIONS, "numbers", limit)
    found = list(gpu._from_child("numbers", "cuda", quick=True))
    assert found[0] == row
    assert [one.met for one in found[1:]] == ([False] if reason else [])
    assert all(reason in one.case for one in found[1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
