"""Everything that only a GPU can tell, in one command and less than eight minutes on an H100 or H200.

    .venv/bin/python benchmarks/gpu.py [--quick] [--only SECTION ...] [--json FILE]
    .venv/bin/python benchmarks/gpu.py --device cpu        (every line of it, with tiny sizes, in Triton's interpreter)

| section | what |
|---|---|
| machine | a copy's bandwidth and a product's FLOP rate: what everything else is a share of |
| numbers | every kernel against float64 on the device; nothing is timed when one is wrong |
| kernels | each against its bytes or operations, and against torch's own (SDPA: FlashAttention, cuDNN) |
| steps | an 8B-shaped model of random weights: decode by batch and context, prefill by length, graph and host time |
| pair | prefill and decode in two processes on one GPU, KV by `cuda_ipc`; NCCL alone |

Exit status: 0; 1 where a number is wrong or a target is missed; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton.benchmarks.gpu_setup import Row

SECTIONS = ("numbers", "kernels", "steps", "pair")


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--json", type=Path, help="write the rows there")
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
    started = time.monotonic()
    rows = _measured(args.device, args.quick, args.only)
    facts = _facts(args.device, time.monotonic() - started)
    _report(rows, facts)
    if args.json:
        args.json.write_text(json.dumps({**facts, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=1))
    return int(any(row.met is False for row in rows if args.device == "cuda" or row.section == "numbers"))


def _measured(device: str, quick: bool, only: Iterable[str]) -> list[Row]:
    """The sections in order; behind wrong numbers nothing is timed."""
    import torch
    from baton.benchmarks.gpu_setup import machine, setup

    at = setup(device, quick)
    rows: list[Row] = []
    with torch.inference_mode():
        rows += machine(at)
        if "numbers" in only:
            from baton.benchmarks.gpu_numbers import numbers

            rows += numbers(at)
            if any(row.met is False for row in rows):
                return rows
        if "kernels" in only:
            from baton.benchmarks.gpu_kernels import kernels

            rows += kernels(at)
        if "steps" in only:
            from baton.benchmarks.gpu_steps import steps

            at.let_go()
            rows += steps(at)
        if "pair" in only:
            from baton.benchmarks.gpu_pair import pair

            at.let_go()
            rows += pair(at, device)
    return rows


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
