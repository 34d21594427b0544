"""Compile what a launch would run, without a GPU.

Launches go through the functions that the product calls, so what is compiled is what a GPU would be given: a driver
that knows a target but no device stands behind Triton, and every launch ends where it would start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .compiled import Compiled, inspect
from .shipped import LAUNCHES


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of a launch for one target."""

    launch: str
    kernel: str
    arch: int
    code: Compiled | None
    reason: str  # why there is no code


class _TargetOnly:
    """A driver for a target without a device: all that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps compiled kernels by device: one for each target

    def get_current_stream(self, device: int) -> int:
        return 0


def _reason(error: BaseException) -> str:
    """The last line of the innermost error: Triton wraps what it found in where it found it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}"


def launches(part: str) -> list[str]:
    """Names of the launches that contain `part`."""
    return [name for name in LAUNCHES if part in name]


def compile_launch(folder: Path, launch: str, arch: int) -> list[Row]:
    """Every kernel of a launch for one target; `folder` keeps what was compiled and read."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default made explicit: Triton warns otherwise
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)
        return found[self.__name__]

    driver.set_active(_TargetOnly(arch))
    JITFunction.run = warm_up
    try:
        LAUNCHES[launch]()
        return [Row(launch, kernel, arch, inspect(code, folder), "") for kernel, code in found.items()]
    except Exception as error:  # a row of the report: the other launches are still to be seen
        return [Row(launch, "-", arch, None, f"does not compile: {_reason(error)}")]
    finally:
        JITFunction.run = run
