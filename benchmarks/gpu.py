"""Everything that only a GPU can tell, in one command and less than eight minutes on an H100 or H200.

    .venv/bin/python benchmarks/gpu.py [--quick] [--only SECTION ...] [--json FILE] [--anyway]
    .venv/bin/python benchmarks/gpu.py --device cpu        (every line of it, with tiny sizes, in Triton's interpreter)

| section | what |
|---|---|
| machine | a copy's bandwidth and a product's FLOP rate: what everything else is a share of |
| numbers | every kernel against float64 on the device; nothing is timed when one is wrong, but with --anyway |
| kernels | each against its bytes or operations, and against torch's own (SDPA: FlashAttention, cuDNN) |
| steps | an 8B-shaped model of random weights: decode by batch and context, prefill by length, graph and host time |
| pair | prefill and decode in two processes on one GPU, KV by `cuda_ipc`; NCCL alone |

Each section is a process of its own with a limit of time: one that fails, breaks the device's context or hangs costs
its own rows alone. Rows are said as they come, and the JSON file holds what is known after each of them.

Exit status: 0; 1 where a number is wrong, a target is missed or something failed; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton.benchmarks.gpu_setup import Row

# seconds that a section may take; what was measured until then is kept
SECTIONS = {"numbers": 120.0, "kernels": 120.0, "steps": 180.0, "pair": 120.0}
_INTERPRETED = 4.0  # times as long


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--anyway", action="store_true", help="measure although a number is wrong")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--section", choices=tuple(SECTIONS), help=argparse.SUPPRESS)  # a child's only one
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py needs a GPU, and torch sees none here; --device cpu runs it without figures",
            file=sys.stderr,
        )
        return 2
    if args.section:
        for row in _of_section(args.section, args.device, args.quick):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    return _measure(args)


def _measure(args: argparse.Namespace) -> int:
    started = time.monotonic()
    rows: list[Row] = []
    for section in args.only:
        for row in _from_child(section, args.device, args.quick):
            if row.section == "machine" and any(row.name == known.name for known in rows):
                continue  # each child measures for itself what its shares are of
            rows.append(row)
            print(f"[{time.monotonic() - started:5.0f} s] {_said(row)}", file=sys.stderr, flush=True)
            if args.json:
                _write(args.json, rows, {})
        if section == "numbers" and any(row.met is False for row in rows) and not args.anyway:
            print("a number is wrong: nothing is timed (--anyway does)", file=sys.stderr)
            break
    facts = _facts(args.device, time.monotonic() - started)
    _report(rows, facts)
    if args.json:
        _write(args.json, rows, facts)
    wrong = (row for row in rows if row.met is False)
    return int(any(args.device == "cuda" or row.section == "numbers" or row.unit == "failed" for row in wrong))


def _write(path: Path, rows: Iterable[Row], facts: dict[str, str | float]) -> None:
    whole = json.dumps({**facts, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=1)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(whole)
    partial.replace(path)


def _said(row: Row) -> str:
    share = "" if row.share is None else f", {row.share:.0%}"
    verdict = {None: "", True: ", met", False: ", NOT MET"}[row.met]
    return f"{row.section}: {row.name} {row.case}: {row.figure:.4g} {row.unit}{share}{verdict}"


def _from_child(section: str, device: str, quick: bool) -> Iterator[Row]:
    """A section's rows as they come, and one that says so if it failed or was too slow."""
    from baton.benchmarks.gpu_setup import Row, failure

    limit = SECTIONS[section] * (1 if device == "cuda" else _INTERPRETED)
    command = [sys.executable, __file__, "--device", device, "--section", section, *(["--quick"] if quick else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        for line in child.stdout or ():
            if line.startswith("{"):
                yield Row(**json.loads(line))
        status = child.wait()
    finally:
        timer.cancel()
        child.kill()
        child.communicate()
    if late.is_set():
        yield failure(section, "out of time", f"ended after {limit:.0f} s")
    elif status:
        yield failure(section, "ended", f"exit status {status}; its last words are above")


def _of_section(section: str, device: str, quick: bool) -> Iterator[Row]:
    """In the child."""
    import torch
    from baton.benchmarks.gpu_setup import machine, setup

    at = setup(device, quick)
    with torch.inference_mode():
        yield from machine(at)
        at.let_go()
        if section == "numbers":
            from baton.benchmarks.gpu_numbers import numbers

            yield from numbers(at)
        elif section == "kernels":
            from baton.benchmarks.gpu_kernels import kernels

            yield from kernels(at)
        elif section == "steps":
            from baton.benchmarks.gpu_steps import steps

            yield from steps(at)
        else:
            from baton.benchmarks.gpu_pair import pair

            yield from pair(at, device)


def _facts(device: str, seconds: float) -> dict[str, str | float]:
    import torch
    import triton

    facts: dict[str, str | float] = {"torch": torch.__version__, "triton": triton.__version__, "seconds": seconds}
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        return {"gpu": found.name, "memory": found.total_memory, "cuda": str(torch.version.cuda), **facts}
    return {"gpu": "none: interpreted, so no time here means anything", **facts}


def _report(rows: list[Row], facts: dict[str, str | float]) -> None:
    table = Table(
        title=", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
        )
    )
    for heading in ("section", "what", "case"):
        table.add_column(heading)
    for heading in ("time", "figure", "share", "target"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            *(row.section, row.name, row.case),
            "" if row.seconds is None else f"{1e3 * row.seconds:.3f} ms",
            f"{row.figure:.4g} {row.unit}",
            "" if row.share is None else f"{row.share:.0%}",
            "" if row.target is None else f"{row.target:.0%}",
            style="red" if row.met is False else "",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
