"""API keys at the HTTP door: the outermost layer, so that what has no key reaches nothing behind it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..proto.errors import Unauthenticated
from .http_generation import error_response
from .tenants import Tenants, current
from .trace_context import parent

OPEN_PATHS = frozenset(
    {"/live", "/ready", "/health", "/v2/health/live", "/v2/health/ready"}
)  # for balancers; everything else needs a key


class Authenticated:
    """ASGI. The path is that of the request line, as it came: no header can change what is asked for."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves, or answers 401."""
        if scope["path"] not in OPEN_PATHS or scope["method"] not in ("GET", "HEAD"):
            parent.set(_header(scope, b"traceparent"))
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                current.set(self._tenants.authenticate(given[0].decode("latin-1") if len(given) == 1 else ""))
            except Unauthenticated as error:
                response = error_response(error)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _header(scope: Scope, wanted: bytes) -> str:
    return next((str(value, "latin-1") for name, value in scope["headers"] if name == wanted), "")
