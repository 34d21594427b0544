"""The router's view of the workers: follows the controller's Watch stream and keeps the last view when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from ..proto import control_pb2
from ..proto.control_pb2_grpc import MembershipStub
from ..proto.peer_tls import PeerTLS
from ..proto.peer_tls import channel as channel_to
from .channels import CLIENT_OPTIONS
from .life_messages import Peer
from .sessions import Member

_log = logging.getLogger(__name__)
_RECONNECT_S = 0.2


def members_of(view: control_pb2.View) -> list[Member]:
    """The members of a view as the router uses them."""
    return [Member(Peer(m.worker_id, m.incarnation), m.role, m.address, m.state) for m in view.members]


async def follow(
    address: str, router_id: str, on_view: Callable[[Sequence[Member]], None], tls: PeerTLS | None
) -> None:
    """Calls `on_view` with each view, for ever; reconnects when the controller is away."""
    while True:
        async with channel_to(address, tls, CLIENT_OPTIONS) as channel:
            call = MembershipStub(channel).Watch(control_pb2.WatchRequest(router_id=router_id))
            try:
                async for view in call:
                    on_view(members_of(view))
            except grpc.aio.AioRpcError as error:
                _log.info("membership at %s: %s %s", address, error.code(), error.details())
            finally:
                call.cancel()
        await asyncio.sleep(_RECONNECT_S)
