"""The C functions of kernels/c as one shared library: built by `make install`, or by `python -m baton.kernels.native`.

The library's name has a hash of its sources, so that one that was built from others is never loaded. It is built for
the plain architecture: what needs AVX2, AVX-512 or AMX asks the processor when it runs. Where there is no library (no
compiler) everything works without it, more slowly, and one warning says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import torch

_HERE = Path(__file__).resolve().parent
_SOURCES = sorted((_HERE / "c").glob("*.[ch]"))
_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
)

_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}

DTYPES = {  # as c/numbers.h counts them
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
COMPUTED = (torch.float32, torch.bfloat16)  # of activations; pools may have any of DTYPES
# The most that a call may use of the processor.
LEVELS = {"scalar": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3, "amx": 4}
BEST = LEVELS["amx"]

_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library. Calls into it release the GIL."""
    path = _path()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning(
            "no C kernels, the slower torch paths run (`make install` builds them where a compiler is): %s", error
        )
        return None


@cache
def function(name: str, arguments: str) -> Callable[..., None] | None:
    """A C function without a result, or None where there is no library.

    `arguments` is a letter each: p a pointer, n an int64, i an int, f a float.
    """
    if (native := library()) is None:
        return None
    found = getattr(native, name)
    found.argtypes, found.restype = [_TYPES[letter] for letter in arguments], None
    return cast(Callable[..., None], found)


def build() -> Path:
    """Compile the sources unless that was done. Raises OSError or CalledProcessError where it cannot be."""
    path = _path()
    if path.exists():
        return path
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) on the PATH")
    with tempfile.TemporaryDirectory(dir=_HERE) as folder:
        made = Path(folder, "made.so")
        units = [str(source) for source in _SOURCES if source.suffix == ".c"]
        subprocess.run([compiler, *_FLAGS, "-o", str(made), *units, "-lm"], check=True)
        made.replace(path)  # whole or not at all, also when two build at the same time
    for old in _HERE.glob("libbaton-*.so"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def _path() -> Path:
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine())).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return _HERE / f"libbaton-{digest.hexdigest()[:16]}.so"


def _main() -> None:
    try:
        print(build())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the C kernels were not built, the slower torch paths will run: {error}", file=sys.stderr)


if __name__ == "__main__":
    _main()
