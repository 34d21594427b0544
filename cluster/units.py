"""Human units of the configuration: `1GiB`, `250ms`, `2/s`, `host:port`, cores `0-3,8`; parsed here and printed back
the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PER_SECOND = {"s": 1.0, "m": 1 / 60, "min": 1 / 60, "h": 1 / 3600}
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Unit:
    """Marks a field whose value was written with a unit; `show` is the inverse of the parser."""

    show: Callable[[Any], str]


def parse_bytes(value: object) -> int:
    """`1GiB`, `500MB` or a plain number of bytes -> bytes. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]+)", value) if isinstance(value, str) else None
    units = {name.lower(): size for name, size in _BYTES.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError("expected a size such as 512MiB or 1GiB")
    return round(float(match[1]) * units[match[2].lower()])


def show_bytes(value: int) -> str:
    """The largest binary unit that divides the value."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTES[name] == 0:
            return f"{value // _BYTES[name]}{name}"
    return f"{value}B"


def human_bytes(value: float) -> str:
    """About that much, for people: `1.4 GiB`."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if value >= _BYTES[name]:
            return f"{value / _BYTES[name]:.1f} {name}"
    return f"{value:.0f} B"


def parse_duration(value: object) -> float:
    """`250ms`, `2s`, `10m` or 0 -> seconds. Raises ValueError; a bare number has no unit and is refused."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    match = re.fullmatch(_NUMBER + r"\s*(us|ms|s|min|m|h)", value) if isinstance(value, str) else None
    if match is None:
        bare = isinstance(value, int | float) and not isinstance(value, bool)
        hint = f"{value}s or {value}ms" if bare else "250ms or 2s"
        raise ValueError(f"expected a duration with its unit, such as {hint}")
    return float(match[1]) * _SECONDS[match[2]]


def show_duration(value: float) -> str:
    """Seconds, or milliseconds below one second."""
    return f"{value * 1000:g}ms" if 0 < value < 1 else f"{value:g}s"


def parse_rate(value: object) -> float:
    """`2/s`, `30/min` -> per second. Raises ValueError."""
    match = re.fullmatch(_NUMBER + r"\s*/\s*(s|min|m|h)", value) if isinstance(value, str) else None
    if match is None:
        bare = isinstance(value, int | float) and not isinstance(value, bool)
        raise ValueError(f"expected a rate with its unit, such as {value if bare else 2}/s")
    return float(match[1]) * _PER_SECOND[match[2]]


def show_rate(value: float) -> str:
    """Per second."""
    return f"{value:g}/s"


def parse_bandwidth(value: object) -> float:
    """`25GB/s` -> bytes per second. Raises ValueError."""
    if not isinstance(value, str) or not value.endswith("/s"):
        raise ValueError("expected a bandwidth such as 25GB/s")
    return float(parse_bytes(value.removesuffix("/s").rstrip()))


def parse_flops(value: object) -> float:
    """`215GFLOP/s` -> operations per second. Raises ValueError."""
    match = re.fullmatch(_NUMBER + r"\s*([GTP])FLOP/s", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a rate of operations such as 215GFLOP/s or 989TFLOP/s")
    return float(match[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[match[2]]


def parse_cores(value: object) -> tuple[int, ...]:
    """`0-3,8` or one number, as taskset writes CPUs -> their numbers in the order written. Raises ValueError."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", text):
        raise ValueError("expected cores such as 3, 0-3 or 0-3,8")
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    cores = tuple(core for ends in ranges for core in range(ends[0], ends[-1] + 1))
    if any(ends[0] > ends[-1] for ends in ranges) or len(set(cores)) < len(cores):
        raise ValueError("expected each core once, and ranges that ascend, such as 0-3,8")
    return cores


def show_cores(value: Sequence[int]) -> str:
    """The inverse of `parse_cores`: neighbours as ranges."""
    ranges: list[list[int]] = []
    for core in value:
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` -> (host, port). Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:50051")
    return host.removeprefix("[").removesuffix("]"), int(port)


def later_address(address: str, number: int) -> str:
    """The address `number` ports above; a port 0 stays one. Raises ValueError."""
    host, port = address.rpartition(":")[0], split_address(address)[1]
    if port + number > 65535:
        raise ValueError(f"{address} has no {number} ports above it")
    return f"{host}:{port + number if port else 0}"


def _check_address(value: str) -> str:
    split_address(value)
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Unit(show_bytes)]
Duration = Annotated[float, BeforeValidator(parse_duration), Unit(show_duration)]
Rate = Annotated[float, BeforeValidator(parse_rate), Unit(show_rate)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth)]
Flops = Annotated[float, BeforeValidator(parse_flops)]
Cores = Annotated[tuple[int, ...], BeforeValidator(parse_cores), Unit(show_cores)]
Address = Annotated[str, AfterValidator(_check_address)]
