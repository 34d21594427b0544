"""`baton doctor CONFIG`: everything that can be known before a start, each finding with what to do about it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from ..proto import peer_tls
from ..proto.errors import ConfigError
from ..text.source import ModelSource, resolve
from . import hardware, spec
from .config import Config
from .findings import Finding
from .launcher import PlacementFailed
from .model_check import ModelFacts, check_model
from .output import results
from .processes import available_cores
from .reconcile import POOLS
from .units import human_bytes, show_cores, split_address

if TYPE_CHECKING:
    from ..engine.model_config import ModelConfig

_SELF_TEST_S = 5.0
_SHM_BYTES = 100 * 2**20


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, one by one. A check that breaks is a finding itself."""
    yield Finding("ok", "config", f"{config.ranks} ranks in 2 pools, launcher {config.cluster.launcher}")
    try:
        facts = check_model(config)
    except ConfigError as error:
        yield Finding("fail", "model", str(error), "correct model.path, or put the files there")
        facts = None
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("ports", lambda: _ports(config)),
        ("threads", lambda: threads(config)),
        ("transport", lambda: _transport(config)),
        ("placement", lambda: _placement(config)),
    ]
    if facts is not None:
        known = facts
        checks.insert(0, ("model", lambda: _model(config, known)))
    for subject, check in checks:
        try:
            yield from check()
        except ConfigError as error:
            yield Finding("fail", subject, str(error), "change the configuration accordingly")
        except Exception as error:
            yield Finding("fail", subject, f"{type(error).__name__}: {error}", "see the message")


def _model(config: Config, facts: ModelFacts) -> Iterator[Finding]:
    from ..engine.model_config import load_config

    model = load_config(facts.source)
    shape = f"{model.arch}, {model.layers} layers, {model.heads} query and {model.kv_heads} KV heads"
    yield Finding("ok", "model", f"{facts.name}: {facts.source.path} ({shape})")
    for warning in facts.warnings:
        yield Finding("warn", "model", warning, "choose a divisor of the number of KV heads")
    yield from _limits(config, model)
    needed = 0
    for role in POOLS:
        pool = spec.pool(config, role)
        kv = pool.memory if pool.memory is not None else config.kv.memory
        ranks = pool.tensor_parallel
        peak = max(_loading_bytes(config, facts.source, rank, ranks) for rank in range(ranks))
        text = f"{role}: {human_bytes(peak)} for weights and {human_bytes(kv)} for KV per rank"
        draft = _draft_bytes(config) if role == "decode" else 0
        if draft:
            text += f", {human_bytes(draft)} for the draft model on one of them"
        if pool.device == "cuda":
            yield from _gpu_memory(text, peak + kv + draft)
        else:
            yield Finding("ok", "memory", text)
            needed += pool.replicas * (ranks * (peak + kv) + draft)
    free = psutil.virtual_memory().available
    total = f"CPU ranks need {human_bytes(needed)} in all, {human_bytes(free)} are available"
    if needed > free:
        yield Finding("fail", "memory", total, "lower kv.memory or the number of replicas")
    elif needed:
        yield Finding("ok", "memory", total)


def _loading_bytes(config: Config, source: ModelSource, rank: int, ranks: int) -> int:
    """Of the weights of one rank, while they are loaded."""
    from ..engine.model_config import load_config
    from ..engine.paged_kv import DTYPES
    from ..engine.weights import Weights

    dtype, scheme = DTYPES[config.model.dtype], config.model.quantization
    weights = Weights.open(source, load_config(source), dtype, scheme, rank, ranks, lambda done, total: None)
    return weights.memory_plan().peak


def _draft_bytes(config: Config) -> int:
    """Of a draft model and its KV pool, which the first rank of a decode worker has beside its own; 0: there is none.

    Raises ConfigError for a draft model that is not there.
    """
    section = config.engine.speculation
    if section.method != "draft":
        return 0
    try:
        source = resolve(config.draft_model_path)
    except ConfigError as error:
        raise ConfigError(f"engine.speculation.draft_model: {str(error).removeprefix('model.path: ')}") from None
    return section.draft_memory + _loading_bytes(config, source, 0, 1)


def _limits(config: Config, model: ModelConfig) -> Iterator[Finding]:
    """What the named hardware cannot exceed with this model."""
    from ..engine.paged_kv import DTYPES

    profile = hardware.find(config)
    if profile is None:
        return
    prefill, decode = (spec.pool(config, role).tensor_parallel for role in POOLS)
    machine = f"on a machine like {config.hardware}"
    fastest = profile.best_prefill(model, prefill)
    yield Finding("ok", "hardware", f"{machine} a prefill worker reads at most {fastest:,.0f} tokens/s")
    fastest = profile.best_decode(model, decode, DTYPES[config.model.dtype].itemsize)
    yield Finding("ok", "hardware", f"{machine} one stream gets at most {fastest:,.0f} tokens/s")


def _gpu_memory(text: str, needed: int) -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("fail", "memory", f"{text}; but torch sees no GPU here", "use device: cpu, or a CUDA build")
        return
    free, _ = torch.cuda.mem_get_info(0)
    if needed > free:
        yield Finding("fail", "memory", f"{text}; a GPU has {human_bytes(free)} free", "lower kv.memory, or raise TP")
    else:
        yield Finding("ok", "memory", f"{text}; a GPU has {human_bytes(free)} free")


def _ports(config: Config) -> Iterator[Finding]:
    for name in ("grpc", "http", "admin"):
        address = getattr(config.router, name)
        host, port = split_address(address)
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
                listener.listen(1)
        except OSError as error:
            yield Finding(
                "fail",
                "ports",
                f"router.{name}: {address}: {error.strerror}",
                f"--set router.{name}={host}:0, or stop it",
            )
        else:
            yield Finding("ok", "ports", f"router.{name}: {address} is free")


def threads(config: Config) -> Iterator[Finding]:
    """Whether the CPU ranks fit the cores."""
    for role in POOLS:
        if missing := set(spec.pool(config, role).cores or ()) - os.sched_getaffinity(0):
            text = f"pools.{role}.cores: {show_cores(sorted(missing))} cannot be used on this machine"
            yield Finding("fail", "threads", text, "name cores that this process may use (nproc, taskset)")
    cores = available_cores()
    roles = [role for role in POOLS if spec.pool(config, role).device == "cpu"]
    if not roles:
        return
    pools = [(spec.pool(config, role), spec.threads(config, role)) for role in roles]
    wanted = sum(pool.replicas * pool.tensor_parallel * count for pool, count in pools)
    each = ", ".join(f"{role} {count}" for role, (_, count) in zip(roles, pools, strict=True))
    text = f"threads per rank: {each}; {wanted} in all on {cores} cores"
    if wanted > cores:
        auto = all(pool.threads == "auto" for pool, _ in pools)
        fix = "use fewer replicas or ranks" if auto else "use fewer replicas or ranks, or threads: auto"
        yield Finding("warn", "threads", text, f"ranks will share cores; {fix}")
    else:
        yield Finding("ok", "threads", text)


def _transport(config: Config) -> Iterator[Finding]:
    files = spec.peer_tls(config)
    if files is not None:
        peer_tls.check(files)
        yield Finding("ok", "transport", "two processes with the files of cluster.tls accept each other")
    if config.kv.tls is not None:
        from ..kv_transfer.tls import client_context

        client_context(spec.transfer_params(config).tls)
        yield Finding("ok", "transport", "the certificate, key and ca of kv.tls can be used")
    devices = {spec.pool(config, role).device for role in POOLS}
    if "cuda" in devices:
        import torch
        import torch.distributed as dist

        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl: Any = torch.cuda.nccl
            version = ".".join(str(part) for part in nccl.version())
            yield Finding("ok", "transport", f"NCCL {version}")
            from .doctor_gpus import gpu_links

            yield from gpu_links(_host(config), torch.cuda.device_count())
        else:
            yield Finding("fail", "transport", "no NCCL or no GPU here", "install a CUDA build of torch, or use cpu")
    host = _host(config)
    seconds = _gloo_pair(host)
    yield Finding("ok", "transport", f"gloo moves tensors between two ranks over {host} (ready in {seconds:.2f} s)")


def _host(config: Config) -> str:
    """Of the links that are tried on this machine."""
    return "127.0.0.1" if config.cluster.host == spec.NODE else config.cluster.host


def _gloo_pair(host: str) -> float:
    """Two gloo ranks in this process exchange a tensor; the seconds that took. Raises what goes wrong."""
    import torch

    from ..kernels.process_group import ReplicatedStore, make_group

    stores: list[ReplicatedStore] = []
    stores += [
        ReplicatedStore(lambda key, value: stores[1].deliver(key, value), _SELF_TEST_S),
        ReplicatedStore(lambda key, value: stores[0].deliver(key, value), _SELF_TEST_S),
    ]
    failures: list[Exception] = []
    sums = [torch.full((4,), float(rank + 1)) for rank in range(2)]

    def rank(number: int) -> None:
        try:
            group = make_group("gloo", stores[number], number, 2, _SELF_TEST_S, host)
            group.allreduce([sums[number]]).wait()
        except Exception as error:
            failures.append(error)

    started = time.monotonic()
    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if failures:
        raise failures[0]
    if any(total.tolist() != [3.0] * 4 for total in sums):
        raise RuntimeError("gloo returned a wrong sum")
    return time.monotonic() - started


def _placement(config: Config) -> Iterator[Finding]:
    room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if config.cluster.launcher == "ray" and room < _SHM_BYTES:
        text = f"/dev/shm has {human_bytes(room)} free; Ray wants {human_bytes(_SHM_BYTES)}"
        yield Finding("warn", "placement", text, "enlarge it (docker run --shm-size=1g)")
    yield from asyncio.run(_all_placed(config))


async def _all_placed(config: Config) -> list[Finding]:
    """Room for every worker at the same time, asked of the launcher that would be used."""
    from .deployment import make_launcher

    try:
        launcher = make_launcher(config)
    except ConfigError as error:
        return [Finding("fail", "placement", str(error), "")]
    slots = []
    try:
        await launcher.open()
        for worker_id in sorted(spec.wanted_workers(config)):
            pool = spec.pool(config, worker_id.partition("-")[0])
            slots.append(await launcher.reserve(worker_id, pool.tensor_parallel, pool.device))
    except PlacementFailed as error:
        return [Finding("fail", "placement", str(error), "fewer replicas or ranks, or more nodes")]
    finally:
        for slot in slots:
            await launcher.release(slot)
        await launcher.close()
    return [
        Finding("ok", "placement", f"there is room for all {len(slots)} workers (launcher {config.cluster.launcher})")
    ]


def run(config: Config) -> int:
    """Print the findings. Returns 1 when something fails, else 0. Raises OutputFailed."""
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    worst = 0
    for finding in examine(config):
        with results() as file:
            console = Console(file=file, highlight=False, soft_wrap=True)
            console.print(f"[{colours[finding.level]}]{finding.level:4}[/] {finding.subject}: ", end="")
            console.print(finding.text + (f" -> {finding.fix}" if finding.fix else ""), markup=False)
        worst |= finding.level == "fail"
    return int(worst)
