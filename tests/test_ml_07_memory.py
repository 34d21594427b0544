"""ML-07: what loading takes is stated before anything is loaded, and a quantised file is never whole in float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import write_tiny_model

MIB = 1 << 20
# The peak is read while the model loads; a small one is loaded first, so that libraries do not count.
LOAD = """
import sys, threading, time, psutil, torch
from baton.tests.harness.model_rig import Rig, engine_params, silent
from baton.engine.model import Model
from baton.engine.model_config import load_config
from baton.engine.ranks import SingleRank
from baton.engine.weights import Weights
from baton.text.source import resolve
torch.set_num_threads(1)
small, large, dtype = sys.argv[1:]
Rig(small, dtype=dtype)
source = resolve(large)
weights = Weights.open(source, load_config(source), getattr(torch, dtype), "none", 0, 1, silent)
plan = weights.memory_plan()
process, peak, running = psutil.Process(), 0, True
before = process.memory_info().rss
def watch():
    global peak
    while running:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model = Model(weights.config, weights, engine_params(large, dtype, 16, 1, True, 1), SingleRank())
after = process.memory_info().rss
running = False
thread.join()
print(plan.resident, plan.peak, after - before, max(peak, after) - before)
"""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_ml_07_predicted_memory_is_what_loading_takes(tmp_path: Path, dtype: str) -> None:
    small = write_tiny_model(tmp_path / "small")
    original = write_tiny_model(
        tmp_path / "original", hidden=1024, heads=16, kv_heads=4, head_dim=64, layers=4, vocab=8192
    )
    write_gguf(original, tmp_path / "large.gguf", "Q8_0")
    command = [sys.executable, "-c", LOAD, str(small), str(tmp_path / "large.gguf"), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    resident, peak, measured, highest = (int(number) / MIB for number in run.stdout.split())
    assert 0.9 * resident < measured <= highest < 1.1 * peak
    assert peak < 2 * highest
