"""The launcher on Ray: one actor per rank, one placement group per worker. The only module that imports ray.

Ray places, starts and watches; requests, tokens and KV never pass through it. A local Ray is private: token
authentication, its own folder, no dashboard. `ray_environment.prepare` must have run before this is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..proto.errors import ConfigError
from .child import Report, ReportHandler, guarded
from .early import SIGNALS
from .failures import StartFailed
from .launcher import PlacementFailed
from .rank_runtime import run_rank
from .spec import WorkerSpec, spec_from_json, spec_to_json

_ray: Any = ray  # its annotations are partial

_RANK = "baton_rank"  # CPU ranks on a private local Ray ask for this: one CPU each would not fit small machines
_PLENTY = 10**6
_OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray accepts; nothing of ours is stored there
_SIGNAL_SEEN_S = 1.0
_log = logging.getLogger(__name__)


class RankActor:
    """Runs one rank in a thread of its process; Ray calls only carry the specification and small reports."""

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop = threading.Event()

    def start(self, values: dict[str, Any]) -> int:
        """Begin; returns the pid."""
        logging.basicConfig(
            level=logging.INFO, handlers=[ReportHandler(self._report)], format="%(message)s", force=True
        )
        node = str(_ray.util.get_node_ip_address())
        threading.Thread(target=self._run, args=(values, node), name="rank", daemon=True).start()
        return os.getpid()

    def poll(self) -> list[dict[str, Any]]:
        """Waits for reports and returns all there are; the last one is `exit`."""
        reports = [self._reports.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return reports

    def stop(self) -> None:
        """Ask the rank to end."""
        self._stop.set()

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        self._reports.put({"kind": kind, **fields})

    def _run(self, values: dict[str, Any], node: str) -> None:
        code = guarded(lambda: run_rank(spec_from_json(values), node, self._report, self._stop), self._report)
        self._report("exit", {"code": code})


@dataclass(frozen=True)
class RaySlot:
    """A placement group with one bundle per rank."""

    ranks: int
    group: Any
    bundle: dict[str, float]


class RayRank:
    """One actor, seen from the controller."""

    def __init__(self, actor: Any, spec: WorkerSpec, on_report: Report) -> None:
        self._actor = actor
        self._spec = spec
        self._on_report = on_report
        self._failure = ""
        self.config_error = False
        self._ended = asyncio.create_task(self._follow())

    async def wait(self) -> str:
        """Wait for the end; says how it ended, "" for a regular end."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Ask the rank to end; kill the actor after `grace_s`, or when it has ended."""
        if grace_s > 0 and not self._ended.done():
            self._actor.stop.remote()
            await asyncio.wait([self._ended], timeout=grace_s)
        ray.kill(self._actor, no_restart=True)
        await self.wait()

    async def _follow(self) -> str:
        try:
            await self._actor.start.remote(spec_to_json(self._spec))
            while True:
                for fields in await self._actor.poll.remote():
                    kind = fields.pop("kind")
                    if kind == "exit":
                        return self._failure or ("" if fields["code"] == 0 else f"exit code {fields['code']}")
                    if kind == "failed":
                        self._failure, self.config_error = fields["message"], fields["config"]
                    self._take(kind, fields)
        except ray.exceptions.RayError as error:
            _log.debug("actor ended: %s", error)
            return self._failure or "its process died"

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._on_report(kind, fields)
        except Exception:
            _log.exception("handling a %r report failed", kind)


class RayLauncher:
    """Starts ranks as actors. `address`: local | auto | host:port."""

    def __init__(self, address: str, placement_timeout_s: float) -> None:
        self._address = address
        self._timeout_s = placement_timeout_s
        self._folder: Path | None = None

    async def open(self) -> None:
        """Start a private Ray, or join the running one. Blocks the loop for seconds: Ray must start on the main thread.

        Raises ConfigError when the running cluster cannot be joined.
        """
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        if self._address == "local":
            self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
            options |= {
                "num_cpus": 0,
                "resources": {_RANK: _PLENTY},
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self._folder),
            }
        try:
            with _own_signals():
                ray.init(address=self._address, **options)
        except ConnectionError as error:
            raise ConfigError(f"cluster.address: no Ray cluster answers at {self._address}: {error}") from None
        except SystemExit:  # Ray's answer to a SIGTERM while it starts
            await asyncio.sleep(_SIGNAL_SEEN_S)  # the loop has got the signal too: whoever listens cancels this
            raise StartFailed("interrupted while Ray was started") from None

    async def reserve(self, name: str, ranks: int, device: str) -> RaySlot:
        """A placement group on one node. Raises PlacementFailed with what is short."""
        resource = "GPU" if device == "cuda" else (_RANK if self._address == "local" else "CPU")
        group = placement_group([{resource: 1.0}] * ranks, strategy="STRICT_PACK", name=f"baton-{name}")
        if not await asyncio.to_thread(group.wait, self._timeout_s):
            remove_placement_group(group)
            raise PlacementFailed(f"{name} was not placed within {self._timeout_s:g} s: {shortage(resource, ranks)}")
        return RaySlot(ranks, group, {resource: 1.0})

    async def start(self, slot: RaySlot, spec: WorkerSpec, on_report: Report) -> RayRank:
        """Start one rank in its bundle."""
        actor = _ray.remote(RankActor).options(**actor_options(slot, spec.rank)).remote()
        return RayRank(actor, spec, on_report)

    async def release(self, slot: RaySlot) -> None:
        """Remove the placement group."""
        remove_placement_group(slot.group)

    async def close(self) -> None:
        """Leave Ray; a private one ends with everything in it."""
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a SIGTERM handler of its own in place, which exits in the middle of whatever runs; undo that."""
    kept = {kind: signal.getsignal(kind) for kind in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray has changed nothing
            for kind, handler in kept.items():
                if signal.getsignal(kind) is not handler and handler is not None:
                    signal.signal(kind, handler)
                    signal.siginterrupt(kind, False)  # as asyncio has it


def actor_options(slot: RaySlot, rank: int) -> dict[str, Any]:
    """How rank `rank` is started: exactly its bundle's resources, so a GPU rank sees exactly one device."""
    gpus = slot.bundle.get("GPU", 0)
    custom = {name: amount for name, amount in slot.bundle.items() if name not in ("GPU", "CPU")}
    return {
        "num_cpus": slot.bundle.get("CPU", 0),
        "num_gpus": gpus,
        "resources": custom,
        "max_restarts": 0,
        "max_concurrency": 4,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=rank),
    }


def shortage(resource: str, ranks: int) -> str:
    """What stands in the way of `ranks` units of a resource on one node, in words."""
    total = [node["Resources"].get(resource, 0) for node in _ray.nodes() if node["Alive"]]
    free = _ray.available_resources().get(resource, 0)
    return (
        f"it needs {ranks} x {resource} on one node; the largest of {len(total)} nodes has {max(total, default=0):g}, "
        f"and {free:g} of {sum(total):g} in the cluster are free"
    )
