"""One running cluster as seen from its driver: controller, control service, router and workers, opened and closed
together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from ..proto import peer_tls
from ..proto.errors import ConfigError
from ..router.params import RouterParams
from . import ray_environment, router_command, spec
from .child import Child
from .config import Config
from .control_service import ControlService
from .controller import Controller, ControllerSettings
from .failures import StartFailed, port_hint
from .launcher import Launcher
from .units import show_duration

_log = logging.getLogger(__name__)


def make_launcher(config: Config) -> Launcher[Any]:
    """The launcher that the configuration names; Ray is imported only for its own. Raises ConfigError, also where ranks
    on this machine are to have GPUs and it has none."""
    if config.cluster.launcher == "process" or config.cluster.address == "local":
        _check_gpus(config)
    if config.cluster.launcher == "process":
        from .launcher_process import ProcessLauncher

        return ProcessLauncher()
    ray_environment.prepare(config.cluster.address)
    from .launcher_ray import RayLauncher

    return RayLauncher(config.cluster.address, config.cluster.placement_timeout)


def _check_gpus(config: Config) -> None:
    from .launcher_process import visible_devices

    wanted = next((role for role in ("prefill", "decode") if getattr(config.pools, role).device == "cuda"), None)
    if wanted is None or visible_devices():
        return
    import torch  # knows of GPUs without a device file, and takes seconds to load

    if not torch.cuda.is_available():
        raise ConfigError(
            f"pools.{wanted}.device: cuda is not available here (no GPU that this process may see, or a torch build "
            "without CUDA); use cpu, or name a Ray cluster with GPUs in cluster.address"
        )


class Deployment:
    """Made by `running`. `endpoints`: grpc, http and admin with their real ports."""

    def __init__(
        self, config: Config, name: str, launcher: Launcher[Any], on_report: Callable[[str, str, dict[str, Any]], None]
    ) -> None:
        self._config = config
        self._name = name
        self._launcher = launcher
        self._on_report = on_report
        self.endpoints: dict[str, str] = {}
        pools = {"prefill": config.pools.prefill, "decode": config.pools.decode}
        settings = ControllerSettings(
            ranks={role: pool.tensor_parallel for role, pool in pools.items()},
            devices={role: pool.device for role, pool in pools.items()},
            start_timeout_s=config.cluster.start_timeout,
            self_test_timeout_s=config.cluster.self_test_timeout,
            stop_grace_s=config.cluster.stop_grace,
            drain_timeout_s=config.cluster.drain_timeout,
            heartbeat_s=config.clocks.heartbeat,
            backoff=spec.backoff(config),
            tls=spec.peer_tls(config),
        )
        self._specs = spec.SpecBuilder(config, name)
        gateways = [pool.vllm_grpc for pool in pools.values() if pool.vllm_grpc is not None]
        if config.router.processes > 1 or gateways:
            self._specs.metrics_folder = tempfile.mkdtemp(prefix="baton-metrics-")
        self.controller: Controller[Any] = Controller(
            settings, launcher, self._specs.worker, spec.wanted_workers(config), on_report
        )
        self._control = ControlService(config.router.admin, self.controller, name, self.endpoints, settings.tls)
        self._routers: dict[int, Child] = {}
        self._stopping = asyncio.Event()
        self._router_task: asyncio.Task[None] | None = None
        self._router_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._router_serves = asyncio.Event()

    async def open(self) -> None:
        """Start everything; returns when requests can be served. Raises StartFailed, AddressTaken or ConfigError."""
        files = spec.peer_tls(self._config)
        if files is not None:
            peer_tls.check(files)
        admin = await self._control.start()
        self.endpoints["admin"] = admin
        self._specs.membership_address = admin
        self._router_task = asyncio.create_task(self._keep_routers(admin))
        await asyncio.sleep(0)  # let it spawn: the launcher may block this loop for seconds
        await self._launcher.open()
        workers = asyncio.create_task(self.controller.open())
        try:
            await asyncio.wait([workers, self._router_task], return_when=asyncio.FIRST_COMPLETED)
            if self._router_ready.done():
                self._router_ready.result()
            elif self._router_task.done():
                self._router_task.result()
            await workers
            await asyncio.shield(self._router_ready)
        finally:
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)
        try:
            await asyncio.wait_for(self._router_serves.wait(), self._config.cluster.start_timeout)
        except TimeoutError:
            limit = show_duration(self._config.cluster.start_timeout)
            raise StartFailed(f"router: not ready to serve within cluster.start_timeout ({limit})") from None

    async def close(self) -> None:
        """Stop the router, which lets live streams finish for a while, then the workers, then the launcher."""
        self._stopping.set()
        grace_s = self._config.cluster.stop_grace
        await asyncio.gather(*(router.stop(grace_s) for router in self._routers.values()))
        if self._router_task is not None:
            self._router_task.cancel()
            await asyncio.gather(self._router_task, return_exceptions=True)
        if self._router_ready.done():
            self._router_ready.exception()  # seen
        await self.controller.close()
        await self._launcher.close()
        await self._control.stop()
        if self._specs.metrics_folder:
            await asyncio.to_thread(shutil.rmtree, self._specs.metrics_folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Of the HTTP service."""
        return f"http{'s' if self._config.router.tls is not None else ''}://{self.endpoints['http']}"

    def capacity(self) -> tuple[int, int]:
        """KV capacity in tokens and maximum concurrency in sequences of the decode pool, as its workers said."""
        ready = self.controller.feed.view.ready("decode")
        welcomes = [self.controller.welcomes.get(member.worker_id) for member in ready]
        tokens = sum(welcome.total_blocks * welcome.block_size for welcome in welcomes if welcome is not None)
        return tokens, sum(welcome.max_sequences for welcome in welcomes if welcome is not None)

    async def _keep_routers(self, admin: str) -> None:
        """All processes; the first one finds the ports that the others share."""
        first = asyncio.create_task(self._keep_router(admin, 0))
        try:
            await asyncio.wait([first, self._router_ready], return_when=asyncio.FIRST_COMPLETED)
            if self._router_ready.done() and not self._router_ready.exception():
                more = range(1, self._config.router.processes)
                await asyncio.gather(first, *(self._keep_router(admin, number) for number in more))
            await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _keep_router(self, admin: str, number: int) -> None:
        """Run a router, and again when it dies; before any was ready its end is a failure to start."""
        name, folder = f"router-{number}" if number else "router", self._specs.metrics_folder
        params = spec.router_params(self._config, self._name, admin)
        params = replace(params, metrics_socket=f"{folder}/{name}" if folder else "")
        failures = 0

        def on_report(kind: str, fields: dict[str, Any]) -> None:
            if kind != "log" or not self._stopping.is_set():  # while it stops it only mourns its workers
                self._on_report(name, kind, fields)
            if kind == "serving":
                self._router_serves.set()
            if kind == "ready":
                self.endpoints.update({"grpc": fields["grpc"], "http": fields["http"]})
                if not self._router_ready.done():
                    self._router_ready.set_result(None)

        while True:
            if self._router_ready.done():  # clients know these ports
                grpc, http = self.endpoints["grpc"], self.endpoints["http"]
                joins = self._config.router.processes > 1
                params = replace(params, grpc_address=grpc, http_address=http, joins=joins)
            router = await router_command.spawn(params, on_report)
            self._routers[number] = router
            reason = await router.wait()
            if self._stopping.is_set():
                return
            if not self._router_ready.done():
                text = _with_hint(reason, params) if reason else "router: ended by itself"
                self._router_ready.set_exception(ConfigError(text) if router.config_error else StartFailed(text))
                return
            failures += 1
            _log.warning("%s: %s; restarting", name, reason or "ended by itself")
            await asyncio.sleep(spec.backoff(self._config).delay(failures))
            if self._stopping.is_set():
                return


def _with_hint(reason: str, params: RouterParams) -> str:
    """The reason, and what to do about it where it is a taken port."""
    for key, address in (("router.grpc", params.grpc_address), ("router.http", params.http_address)):
        if reason.startswith(f"{key}: cannot listen on "):
            return f"{reason}; {port_hint(key, address.rpartition(':')[0])}"
    return reason


@contextlib.asynccontextmanager
async def running(
    config: Config, name: str, on_report: Callable[[str, str, dict[str, Any]], None]
) -> AsyncIterator[Deployment]:
    """A cluster on `config` that serves while the block runs. Raises StartFailed, AddressTaken or ConfigError."""
    deployment = Deployment(config, name, make_launcher(config), on_report)
    try:
        await deployment.open()
        yield deployment
    finally:
        await deployment.close()
