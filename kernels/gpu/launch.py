"""What every launch needs: the machine it is for, and the sizes that this machine's kernels were checked with.

Import it, and the modules beside it, only where a GPU is used: they load Triton.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

_FOLDER = Path(__file__).parent
_INTERPRETED = 90  # whose sizes the interpreter takes


def family() -> int:
    """80, 90 or 100: whose sizes the current device takes. Raises ValueError for one below compute capability 8.0."""
    if knobs.runtime.interpret:
        return _INTERPRETED
    capability = int(driver.active.get_current_target().arch)
    if capability < 80:
        raise ValueError(f"a GPU of compute capability {capability / 10}: the kernels need 8.0 or more")
    # 9.0 and 10.x have 227 KiB of shared memory and TMA; 8.x and 12.x are given what fits 99 KiB
    return {9: 90, 10: 100}.get(capability // 10, 80)


def sizes(kernel: str, case: str) -> dict[str, Any]:
    """Tile sizes, `num_warps` and `num_stages` of `kernel` for `case`, as configurations.yaml has them for this device.

    Raises ValueError where that case does not exist for it.
    """
    cases = _configurations()[kernel].get(case, {})
    found = cases.get(family(), cases.get("all"))
    if found is None:
        raise ValueError(f"{kernel} has no variant {case} for GPUs of compute capability {family() / 10}")
    return dict(found)


@cache
def _configurations() -> dict[str, dict[str, dict[int | str, dict[str, Any]]]]:
    return dict(yaml.safe_load((_FOLDER / "configurations.yaml").read_text()))


def check_rows(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} of strides {tensor.stride()}: its last dimension must be contiguous")
