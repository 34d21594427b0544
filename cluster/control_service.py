"""The controller's gRPC port: Membership for routers, Admin for people."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ..proto import control_pb2 as pb
from ..proto.control_pb2_grpc import (
    AdminServicer,
    MembershipServicer,
    add_AdminServicer_to_server,
    add_MembershipServicer_to_server,
)
from ..proto.peer_tls import PeerTLS, add_port
from ..router.channels import server_options
from .controller import Controller
from .failures import AddressTaken, Refused, port_hint
from .units import split_address

_MESSAGE_BYTES = 4 << 20


class _Membership(MembershipServicer):
    def __init__(self, controller: Controller[Any]) -> None:
        self._controller = controller

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.View]:
        """The view, and each later one."""
        async for view in self._controller.feed.follow():
            yield view.to_wire()


class _Admin(AdminServicer):
    def __init__(self, controller: Controller[Any], model: str, endpoints: dict[str, str]) -> None:
        self._controller = controller
        self._model = model
        self._endpoints = endpoints
        self._since = time.monotonic()

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        """Who runs where."""
        return pb.StatusResponse(
            view=self._controller.feed.view.to_wire(),
            model=self._model,
            uptime_s=time.monotonic() - self._since,
            endpoints=[pb.Endpoint(name=name, address=address) for name, address in self._endpoints.items()],
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Answers when the worker has stopped."""
        try:
            return pb.DrainResponse(message=await self._controller.drain(request.worker_id))
        except Refused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        """Answers at once; `status` shows the progress."""
        try:
            return pb.ScaleResponse(message=self._controller.scale(request.pool, request.replicas))
        except Refused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        """Not possible on a running worker."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{request.worker_id} cannot change its role while it runs; scale one pool up and drain it in the other",
        )
        raise NotImplementedError


class ControlService:
    """The server. `endpoints` is shown by Status and may be filled in later."""

    def __init__(
        self,
        address: str,
        controller: Controller[Any],
        model: str,
        endpoints: dict[str, str],
        tls: PeerTLS | None = None,
    ) -> None:
        self._wanted, self._tls = address, tls
        self._server = grpc.aio.server(options=server_options(_MESSAGE_BYTES))
        add_MembershipServicer_to_server(_Membership(controller), self._server)
        add_AdminServicer_to_server(_Admin(controller, model, endpoints), self._server)

    async def start(self) -> str:
        """Listen; returns the address with its real port. Raises AddressTaken."""
        host, _ = split_address(self._wanted)
        try:
            port = add_port(self._server, self._wanted, self._tls)
        except RuntimeError:
            port = 0
        if port == 0:
            hint = port_hint("router.admin", host)
            raise AddressTaken(f"router.admin: {self._wanted} is taken or cannot be bound; {hint}")
        await self._server.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """End all calls."""
        await self._server.stop(0)
