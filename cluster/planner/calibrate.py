"""`baton calibrate`: measures the engine of a configuration on this machine and writes a hardware profile.

The law of `proto/step_time.py` is fitted to a grid of prefill steps and one of decode steps, with one rank. The file is
a profile like those in configs/hardware/: the plan and the simulator read it.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ...proto.errors import ConfigError
from .. import hardware, spec
from ..access import NOBODY, Access
from ..bench_closed import calibrate as calibrate_cluster
from ..config import Config
from ..deployment import running
from ..hardware import Fitted, Hardware
from ..model_check import ModelFacts
from ..output import results, say
from ..progress import StartProgress
from . import measuring, setup
from .fitting import errors, non_negative
from .measuring import Timed
from .model_shape import find

_UNLIMITED = 1e15  # bytes/s, where the time did not grow with the tokens


def fitted(cells: list[Timed]) -> Fitted:
    """The law of these cells, with what it was fitted to. Raises ConfigError: too few to know three coefficients."""
    if len(cells) < 4:
        raise ConfigError(
            f"kv.memory: leaves room for {len(cells)} steps of different sizes, too few to fit a law; give more, or "
            "raise pools.prefill.max_batch_tokens or pools.decode.max_sequences"
        )
    features = np.array([cell.features for cell in cells])
    seconds = np.array([cell.seconds for cell in cells])
    law = non_negative(features, seconds)
    found = errors(list(features @ law), list(seconds))
    sizes, contexts = [cell.size for cell in cells], [cell.context for cell in cells]
    return Fitted(
        a=float(law[0]),
        b=float(law[1]),
        c=float(law[2]),
        steps=len(cells),
        tokens=[min(sizes), max(sizes)],
        context=[min(contexts), max(contexts)],
        mean_error=float(found.mean()),
        p90_error=float(np.quantile(found, 0.9)),
    )


async def with_cluster(config: Config, facts: ModelFacts, output: Path, repeats: int, access: Access = NOBODY) -> int:
    """The same as `run`, and before it the KV's way through a cluster that is started for it."""
    check(config, output)
    progress = StartProgress(verbose=False)
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            profile = await calibrate_cluster(config, deployment, access)
    way, token = profile.transfer, setup.site(config).cost("prefill").kv_token_bytes
    bandwidth = token / way.token_s if way.token_s > 0 else _UNLIMITED
    return run(config, output, repeats, {"alpha_s": way.alpha_s, "bandwidth": f"{bandwidth / 1e9:.9f}GB/s"})


def check(config: Config, output: Path) -> None:
    """Raises ConfigError for what cannot be calibrated."""
    for role in ("prefill", "decode"):
        if spec.pool(config, role).tensor_parallel != 1:
            raise ConfigError(f"pools.{role}.tensor_parallel: is more than 1; one rank is calibrated: set it to 1")
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output: is {output}, but must end in .yaml")
    if spec.threads(config, "prefill") != spec.threads(config, "decode"):
        raise ConfigError("pools.prefill.threads: differs from pools.decode.threads; calibrate with the same in both")


def run(config: Config, output: Path, repeats: int, transfer: dict[str, Any] | None = None) -> int:
    """Measure, fit, write and show. `transfer`: as the file holds it. Raises ConfigError."""
    check(config, output)
    params = replace(spec.local_engine(config), threads=spec.threads(config, "decode"))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(params.threads)  # before torch is imported
    from ...engine.ranks import SingleRank
    from ...engine.runner import Runner

    runner = Runner(params, SingleRank(), lambda done, total: None, None)
    runner.warm_up()
    cells = measuring.grid(
        config.pools.prefill.max_batch_tokens,
        config.pools.decode.max_sequences,
        runner.max_model_len,
        runner.blocks * params.block_size,
        params.block_size,
    )
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=cells.cells * (repeats + 1))
        prefill, decode = measuring.run(runner, cells, repeats, 0, lambda: bar.advance(task))
    laws = {"prefill": fitted(prefill), "decode": fitted(decode)}
    _write(config, output, laws, params.threads, transfer)
    _show(prefill, decode, laws)
    say(f"wrote {output}; use it with `hardware: {output}`")
    return 0


def _write(
    config: Config, output: Path, laws: dict[str, Fitted], threads: int, transfer: dict[str, Any] | None
) -> None:
    known = hardware.find(config)
    profile: dict[str, Any] = _as_read(known) if known is not None else _this_machine()
    entry = {
        "model": find(config.model.path, config.folder).name,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "tensor_parallel": 1,
        "threads": threads,
        **{role: law.model_dump() for role, law in laws.items()},
        "transfer": transfer,
        "version": version("baton"),
        "device": _device(config),
        "date": time.strftime("%Y-%m-%d"),
    }
    profile["measured"] = [entry]
    Hardware.model_validate(profile)
    try:
        output.write_text(yaml.safe_dump(profile, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--output: {output}: {error.strerror}") from None


def _as_read(known: Hardware) -> dict[str, Any]:
    """The profile as its file has it: rates with their units."""
    shown: dict[str, Any] = {"memory": known.memory}
    for name in ("bandwidth", "link", "network"):
        if (value := getattr(known, name)) is not None:
            shown[name] = f"{value / 1e9:g}GB/s"
    for name in ("flops", "fp8_flops", "int8_flops"):
        if (value := getattr(known, name)) is not None:
            shown[name] = f"{value / 1e9:g}GFLOP/s"
    shown |= {"node": known.node, "all_reduce": known.all_reduce, "source": known.source}
    if known.price is not None:
        shown["price"] = known.price
    return shown | {"efficiency": known.efficiency.model_dump()}


def _this_machine() -> dict[str, Any]:
    base = yaml.safe_load((hardware.CATALOGUE / "cpu.yaml").read_text())
    return dict(base) | {"memory": psutil.virtual_memory().total}


def _device(config: Config) -> str:
    if config.pools.decode.device == "cuda":
        import torch

        return str(torch.cuda.get_device_name(0))
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _show(prefill: list[Timed], decode: list[Timed], laws: dict[str, Fitted]) -> None:
    with results() as file:
        console = Console(file=file, highlight=False)
        for role, cells in (("prefill", prefill), ("decode", decode)):
            law = laws[role]
            table = Table("tokens" if role == "prefill" else "sequences", "context", "ms", "law", "error", title=role)
            for cell in cells:
                said = law.a * cell.features[0] + law.b * cell.features[1] + law.c * cell.features[2]
                row = (f"{cell.size}", f"{cell.context}", f"{cell.seconds * 1e3:.2f}", f"{said * 1e3:.2f}")
                table.add_row(*row, f"{said / cell.seconds - 1:+.1%}")
            console.print(table)
            console.print(
                f"{role}: {law.a * 1e3:.3f} ms + {law.b * 1e6:.3f} us * x + {law.c * 1e9:.4f} ns * y; "
                f"{law.steps} steps, error {law.mean_error:.1%} mean, {law.p90_error:.1%} p90"
            )
