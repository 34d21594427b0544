"""Runs the service beside a worker, in its event loop: a port, a small router, and the cluster's membership."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from ..proto.errors import ConfigError
from ..router import membership
from ..router.channels import public_options
from ..router.core import Core
from ..router.front_door import FrontDoor
from ..router.front_tls import grpc_credentials
from ..router.grpc_auth import Authenticated
from ..router.grpc_guard import Guard
from ..router.metrics_peers import MetricsPeers
from ..router.sessions import Member
from ..router.tenants import Tenants
from ..router.text_service import TextService
from ..text.source import resolve
from .params import VllmParams
from .service import VllmEngine

_log = logging.getLogger(__name__)
SERVICE = "vllm.grpc.engine.VllmEngine"
_HEALTH_POLL_S = 0.1
_STOP_S = 0.2


async def serve(params: VllmParams, listening: Callable[[str], None]) -> None:
    """Serves until it is cancelled; `listening` is told the address. Keys, rates and TLS are those of the router's
    front door. Raises ConfigError when the address is taken or a file of TLS cannot be used."""
    async with contextlib.AsyncExitStack() as stack:
        options = public_options(params.router.grpc, params.router.limits.body_bytes)
        tenants, tls = Tenants(params.router.tenants, time.monotonic(), params.keyless), params.router.tls
        credentials = grpc_credentials(tls) if tls is not None else None
        interceptors = (Authenticated(tenants), Guard(frozenset((SERVICE,))))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        stack.push_async_callback(server.stop, _STOP_S)
        try:
            if credentials is None:
                port = server.add_insecure_port(params.address)
            else:
                port = server.add_secure_port(params.address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"{params.key}: cannot listen on {params.address}: {error}") from None
        text = await asyncio.to_thread(TextService.load, params.router.model_path, params.router.max_inflight)
        stack.callback(text.close)
        rng = random.Random()
        core = Core(params.router, text.tokenizer, rng, tenants)
        stack.push_async_callback(core.sessions.close)
        peers = MetricsPeers(params.router.metrics_socket, core.metrics)
        await peers.start()
        stack.push_async_callback(peers.stop)
        service = VllmEngine(params, FrontDoor(params.router, core, text, rng), resolve(params.router.model_path))
        checks = health.aio.HealthServicer()
        add_VllmEngineServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        if params.router.grpc.reflection:
            reflection.enable_server_reflection([SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
        await server.start()
        listening(f"{params.address.rpartition(':')[0]}:{port}")

        def view_changed(members: Sequence[Member]) -> None:
            core.view_changed([member for member in members if _is_ours(params, member)])

        router = params.router
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                membership.follow(router.membership_address, router.router_id, view_changed, router.peer_tls)
            )
            tasks.create_task(_follow_health(service, checks))


def _is_ours(params: VllmParams, member: Member) -> bool:
    """The gateway has chosen this worker of its pool, so no other one is known here; of the other pool all are."""
    return member.role != params.role or member.peer.worker_id == params.worker_id


async def _follow_health(service: VllmEngine, checks: health.aio.HealthServicer) -> None:
    known: bool | None = None
    while True:
        if service.ready() != known:
            known = service.ready()
            status = health_pb2.HealthCheckResponse.SERVING if known else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE):
                await checks.set(name, status)
        await asyncio.sleep(_HEALTH_POLL_S)
