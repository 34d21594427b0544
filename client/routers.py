"""The channels to one or several routers, used in turn."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import grpc

from ..proto.baton_pb2_grpc import BatonStub

# A router that is frozen is noticed within 20 s; all three settings are needed for that.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]
# Where there is another router to go to, one that says it is not serving fails its calls at once.
_HEALTH = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})


@dataclass(frozen=True)
class Router:
    """One router."""

    address: str
    channel: grpc.aio.Channel
    stub: BatonStub


class Routers:
    """Opens the channels; inside an event loop. `addresses`: host:port each, at least one."""

    def __init__(self, addresses: Sequence[str], credentials: grpc.ChannelCredentials | None) -> None:
        if not addresses:
            raise ValueError("a client needs the address of at least one router")
        options = [*_OPTIONS, *([("grpc.service_config", _HEALTH)] if len(addresses) > 1 else [])]
        self.all: list[Router] = []
        for address in addresses:
            if credentials is None:
                channel = grpc.aio.insecure_channel(address, options=options)
            else:
                channel = grpc.aio.secure_channel(address, credentials, options=options)
            self.all.append(Router(address, channel, BatonStub(channel)))
        self._next = 0

    def next(self, tried: Collection[str]) -> Router:
        """The next one in turn that is not among `tried`; when all are, the next one."""
        turn = [self.all[(self._next + i) % len(self.all)] for i in range(len(self.all))]
        chosen = next((router for router in turn if router.address not in tried), turn[0])
        self._next = (self.all.index(chosen) + 1) % len(self.all)
        return chosen

    async def close(self) -> None:
        """Closes all channels, and with them what still runs on them."""
        for router in self.all:
            await router.channel.close()
