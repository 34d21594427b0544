"""The public gRPC port: baton.v1, the Open Inference Protocol, and the standard health, reflection and channelz."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ..proto.baton_pb2_grpc import add_BatonServicer_to_server
from ..proto.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from . import open_inference
from .channels import public_options
from .core import Core
from .errors import AddressTaken
from .front_door import FrontDoor
from .front_tls import grpc_credentials
from .grpc_auth import Authenticated
from .grpc_guard import Guard
from .grpc_service import BatonService
from .open_inference import OpenInference
from .params import GrpcParams, RouterParams
from .tenants import Tenants

_SERVICE = "baton.v1.Baton"
_HEALTH = "grpc.health.v1.Health"
_CHANNELZ = "grpc.channelz.v1.Channelz"
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_HEALTH_POLL_S = 0.1
_STOP_S = 1.0


class GrpcFrontend:
    """Serves from `start` to `stop`; make it with `bind`."""

    def __init__(self, server: grpc.aio.Server, address: str, params: GrpcParams) -> None:
        self._server = server
        self.address = address
        self._params = params
        self._health = health.aio.HealthServicer()
        self._services = [_SERVICE]  # beside the standard ones

    @staticmethod
    async def bind(params: RouterParams, tenants: Tenants) -> GrpcFrontend:
        """Takes the port. Raises AddressTaken, and ConfigError for files of TLS that cannot be used."""
        address, tls = params.grpc_address, params.tls
        credentials = grpc_credentials(tls) if tls is not None else None
        guard = Guard(frozenset((_SERVICE, open_inference.SERVICE)))
        options = public_options(params.grpc, params.limits.body_bytes, shared=params.share_ports)
        server = grpc.aio.server(interceptors=(Authenticated(tenants), guard), options=options)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            await server.stop(None)
            raise AddressTaken(f"router.grpc: cannot listen on {address}: {error}") from error
        return GrpcFrontend(server, f"{address.rsplit(':', 1)[0]}:{port}", params.grpc)

    async def start(self, door: FrontDoor) -> None:
        """Begins to serve."""
        add_BatonServicer_to_server(BatonService(door), self._server)
        if self._params.open_inference:
            add_GRPCInferenceServiceServicer_to_server(OpenInference(door), self._server)
            self._services.append(open_inference.SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*self._services, _HEALTH]
        if self._params.channelz:
            channelz.add_channelz_servicer(self._server)
            names.append(_CHANNELZ)
        if self._params.reflection:
            self._reflect([*names, reflection.SERVICE_NAME])
        await self._set_health(False)
        await self._server.start()

    def _reflect(self, names: list[str]) -> None:
        """Under its old name and under its new one, which have the same messages."""
        reflection.enable_server_reflection(names, self._server)
        method = grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": method})
        self._server.add_generic_rpc_handlers((handler,))

    async def follow_health(self, core: Core, serving: Callable[[], None]) -> None:
        """Keeps the health service in step with readiness, for ever. `serving` is called whenever it becomes ready."""
        known = False
        while True:
            ready = not core.not_ready()
            if ready != known:
                known = ready
                await self._set_health(ready)
                if ready:
                    serving()
            await asyncio.sleep(_HEALTH_POLL_S)

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Closes the port; answers that are over may still leave, the rest is cut."""
        await self._server.stop(_STOP_S)
