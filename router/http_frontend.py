"""The port of the HTTP service, and the server behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn

from .batches import Batches
from .errors import AddressTaken
from .front_door import FrontDoor
from .front_tls import uvicorn_options
from .http_auth import Authenticated
from .http_protocol import Protocol
from .http_routes import application
from .metrics_peers import MetricsPeers

_STOP_S = 2  # for responses that are being written when the server stops


def bind(address: str, shared: bool) -> socket.socket:
    """A listening socket; shared: others may listen there too. Raises AddressTaken, naming the address."""
    host, _, port = address.rpartition(":")
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family[0], socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise AddressTaken(f"router.http: cannot listen on {address}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # on Linux: past TIME_WAIT, never a shared port
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(family[4])
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise AddressTaken(f"router.http: cannot listen on {address}: {error}") from error
    return sock


class HttpFrontend:
    """Binds at once, serves while `serve` runs. Create it inside the event loop."""

    def __init__(self, address: str, shared: bool) -> None:
        """Raises AddressTaken."""
        self._socket = bind(address, shared)
        self.address = f"{address.rsplit(':', 1)[0]}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None

    async def serve(self, door: FrontDoor, batches: Batches | None, peers: MetricsPeers) -> None:
        """Serves until `stop`."""
        config = uvicorn.Config(
            Authenticated(application(door, batches, peers), door.core.tenants),
            **uvicorn_options(door.params.tls),
            http=Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Lets `serve` return; frees the port when it never ran."""
        if self._server is not None:
            self._server.stop()
        else:
            self._socket.close()


class _Server(uvicorn.Server):
    """Leaves the process' signals alone: the router's own main handles them. Stops at once instead of at a tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let `serve` return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Once a second the date of the headers is renewed."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield
