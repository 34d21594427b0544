"""HTTP/1.1 as uvicorn speaks it, and beside ASGI's `send` a way for single tokens: one call, no task that wakes up."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "baton.write"


class Protocol(HttpToolsProtocol):
    """Offers `writer` as an extension of ASGI."""

    def on_message_begin(self) -> None:
        """A request comes."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"write": self._write}}

    def _write(self, part: bytes) -> bool:
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


def writer(scope: Scope) -> Callable[[bytes], bool] | None:
    """Writes a further part of an answer whose first one was sent, whose length was not said, and to which nobody else
    is sending; a part is not empty. False: nothing was written, because the client reads too slowly or has left.
    None: the server offers no such thing.
    """
    write: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("write")
    return write
