"""What happens inside the process of one rank, whoever launched it: environment, then the worker's own main."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ..proto import failpoints
from ..proto.errors import ConfigError
from ..proto.worker_serve import Beside
from .child import Report
from .early import quiet_grpc
from .processes import bind, settle
from .spec import WorkerSpec, localised


def run_rank(spec: WorkerSpec, node_address: str, report: Report, stop: threading.Event) -> None:
    """Run the leader or a follower until `stop` is set. Raises whatever ends it, ConfigError included."""
    params = spec.params
    failpoints.identify(spec.worker_id if spec.rank == 0 else f"{spec.worker_id}.{spec.rank}")
    if spec.cores:
        try:
            bind(spec.cores)  # before any thread of torch or gRPC: they inherit it
        except ValueError as error:
            raise ConfigError(f"pools.{spec.role}.cores: {error}") from None
    quiet_grpc()  # a node of a running Ray cluster does not have our environment
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(params.engine.threads)  # before torch is imported
    spec = localised(spec, node_address)
    if params.engine.device == "cuda":
        check_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def tell(kind: str, fields: dict[str, Any]) -> None:
        if kind == "ready":
            settle()
            fields = {**fields, "pid": os.getpid(), "node": socket.gethostname()}
        report(kind, fields)

    if spec.prefill is not None:
        from ..prefill_worker import main as prefill

        if spec.rank == 0:
            prefill.run_leader(spec.prefill, tell, stop, _beside(spec, tell))
        else:
            prefill.run_follower(spec.prefill, spec.rank, spec.leader, stop)
    elif spec.decode is not None:
        from ..decode_worker import main as decode

        if spec.rank == 0:
            decode.run_leader(spec.decode, tell, stop, _beside(spec, tell))
        else:
            decode.run_follower(spec.decode, spec.rank, spec.leader, stop)


def _beside(spec: WorkerSpec, tell: Report) -> Beside | None:
    """What the leader serves beside its sessions with routers."""
    params = spec.vllm
    if params is None:
        return None
    from ..vllm_engine import main as vllm_engine

    def serve(serving: Callable[[], None]) -> Coroutine[Any, Any, None]:
        def listening(address: str) -> None:
            tell("vllm", {"address": address})
            serving()

        return vllm_engine.serve(params, listening)

    return serve


def check_visible_devices(visible: str) -> None:
    """Every GPU rank sees exactly one device. Raises ConfigError otherwise, before anything touches a GPU."""
    devices = [name for name in visible.split(",") if name.strip()]
    if len(devices) != 1:
        raise ConfigError(f"a GPU rank must see exactly one device, but CUDA_VISIBLE_DEVICES is {visible!r}")
