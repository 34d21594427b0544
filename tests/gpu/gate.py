"""Compile every shipped launch for every target, and hold the machine code against kernels/gpu/budgets.yaml.

python -m baton.tests.gpu.gate [--only TEXT] [--arch 90] [--propose]
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from .compile_launch import Row, compile_launch, launches
from .compiled import Compiled

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90, 100)
_AT_MOST = ("registers", "spills", "shared")  # the other numbers: at least


def broken(row: Row, budgets: dict[str, Any]) -> list[str]:
    """What a row has too much or too little of."""
    code, where = row.code, f"{row.launch}: {row.kernel} on sm_{row.arch}"
    if code is None:
        return [] if row.arch in budgets.get(row.launch, {}).get("without", ()) else [f"{where}: {row.reason}"]
    limits = budgets.get(row.launch, {}).get(row.kernel)
    if limits is None:
        return [f"{where} has no budget: add one to kernels/gpu/budgets.yaml (--propose prints it)"]
    limits = {"spills": 0, **limits.get("all", {}), **limits.get(row.arch, {})}
    needs = limits.pop("needs", [])
    found = [f"{where} has no {need}" for need in needs if not code.instructions.get(need)]
    for what, limit in limits.items():
        value = getattr(code, what)
        if (value > limit) if what in _AT_MOST else (value < limit):
            sign = "at most" if what in _AT_MOST else "at least"
            found.append(f"{where}: {what} {value:.4g}, budget {sign} {limit:.4g}")
    return found


def propose(rows: list[Row]) -> str:
    """Budgets with a tenth of slack for what was compiled, as budgets.yaml has them."""
    lines: list[str] = []
    for launch in dict.fromkeys(row.launch for row in rows):
        own = [row for row in rows if row.launch == launch]
        lines.append(f"{launch}:")
        if without := [row.arch for row in own if row.code is None]:
            lines.append(f"  without: {without}")
        for kernel in dict.fromkeys(row.kernel for row in own if row.code is not None):
            lines.append(f"  {kernel}:")
            lines += [f"    {row.arch}: {_limits(row.code)}" for row in own if row.code and row.kernel == kernel]
    return "\n".join(lines)


def _limits(code: Compiled) -> str:
    registers = min(255, -(-code.registers * 11 // 80) * 8)
    numbers = f"registers: {registers}, shared: {-(-code.shared // 1024) * 1024}, ctas: {max(1, code.ctas * 9 // 10)}"
    spills = f", spills: {code.spills}" if code.spills else ""
    return f"{{{numbers}{spills}, vector: {int(code.vector * 95) / 100}, needs: [{', '.join(code.instructions)}]}}"


def table(rows: list[Row], broken_rows: set[int]) -> Table:
    """One line for each kernel and target; red where a budget is broken."""
    result = Table(title="Compiled kernels")
    for heading in ("launch", "kernel", "target"):
        result.add_column(heading, no_wrap=True)
    for heading in ("regs", "spills", "shared B", "CTAs/SM", "128-bit"):
        result.add_column(heading, justify="right")
    result.add_column("instructions")
    for index, row in enumerate(rows):
        cells = [row.reason[:60]]
        if (code := row.code) is not None:
            counts = " ".join(f"{name}:{count}" for name, count in code.instructions.items())
            numbers = (code.registers, code.spills, code.shared, code.ctas)
            cells = [*map(str, numbers), f"{code.vector:.0%}", counts]
        style = "red" if index in broken_rows else ""
        result.add_row(row.launch, row.kernel, f"sm_{row.arch}", *cells, style=style)
    return result


def main() -> int:
    """0 when every kernel keeps its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--propose", action="store_true", help="print budgets for what was compiled")
    args = parser.parse_args()
    folder = ROOT / "build" / "kernels"
    jobs = [(name, arch) for name in launches(args.only) for arch in args.arch]
    if not jobs:
        parser.error(f"no launch has {args.only!r} in its name")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = [row for some in pool.map(partial(compile_launch, folder), *zip(*jobs, strict=True)) for row in some]
    if args.propose:
        print(propose(rows))
        return 0
    budgets = yaml.safe_load((ROOT / "kernels" / "gpu" / "budgets.yaml").read_text()) or {}
    lines = [(index, line) for index, row in enumerate(rows) for line in broken(row, budgets)]
    lines += [(-1, f"{launch}: a budget for no launch") for launch in budgets if launch not in launches("")]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows, {index for index, _ in lines}))
    for _, line in lines:
        console.print(f"over budget: {line}", style="red", soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(rows)} kernels, {len(lines)} broken budgets")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
