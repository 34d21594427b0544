"""What the code of a kernel says about it, without a GPU: the cubin's resources, and the accesses in its PTX."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton import knobs

_PTX = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05.mma": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
}
_SPILL = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?:STL|LDL)\b", re.M)
_ACCESS = re.compile(r"\b(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\b")  # between global memory and registers
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?\],\s*0x([0-9a-f]+)")  # to shared memory; bytes
_SHARED_PER_SM = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one target."""

    registers: int  # of a thread
    spills: int  # loads and stores of local memory, in the code
    shared: int  # bytes
    ctas: int  # resident on an SM, by registers, warps and shared memory
    vector: float  # bytes of 128-bit accesses over all to global memory, in the PTX; 1 where there are none
    instructions: dict[str, int]  # of those that `_PTX` names


def inspect(kernel: Any, folder: Path) -> Compiled:
    """Read a compiled Triton kernel; what was read before is kept in `folder`."""
    kept = folder / f"{kernel.hash}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text()))
    result = _read(kernel)
    kept.write_text(json.dumps(asdict(result)))
    return result


def _read(kernel: Any) -> Compiled:
    meta, ptx = kernel.metadata, kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name)
        local = int(_matched(r"STACK:(\d+)", usage)) + int(_matched(r"LOCAL:(\d+)", usage))
        # a kernel without local memory cannot spill: disassembling costs ten times what all else does
        code = _output(knobs.nvidia.nvdisasm.path, "-c", cubin.name) if local else ""
    registers = int(_matched(r"REG:(\d+)", usage))
    moved: Counter[int] = Counter()  # bytes, by the width of an access
    for count, bits in _ACCESS.findall(ptx):
        width = int(count or 1) * int(bits) // 8
        moved[width] += width
    for digits in _ASYNC.findall(ptx):
        moved[int(digits, 16)] += int(digits, 16)
    return Compiled(
        registers=registers,
        spills=len(_SPILL.findall(code)),
        shared=meta.shared,
        ctas=_ctas(registers, meta.num_warps, meta.shared, meta.target.arch),
        vector=moved[16] / moved.total() if moved else 1.0,
        instructions={name: n for name, what in _PTX.items() if (n := len(re.findall(what, ptx)))},
    )


def _ctas(registers: int, warps: int, shared: int, arch: int) -> int:
    of_warp = -(-registers * 32 // 256) * 256  # registers are given out in units of 256
    by_shared = _SHARED_PER_SM[arch] // (shared + 1024) if shared else 32
    return min(65536 // (of_warp * warps), 64 // warps, 32, by_shared)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def _matched(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in {text[:200]!r}")
    return found[1]
