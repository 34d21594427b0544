"""How a command gets into a cluster that asks for keys or speaks TLS."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from ..client.api import Client
from ..client.retry import Retry
from ..proto.errors import ConfigError
from .http_client import HttpConnection, Origin


@dataclass(frozen=True, slots=True)
class Access:
    """`key`: of a tenant. `authority`: PEM file of whom the router's certificate comes from; over gRPC it asks for
    TLS, over https it replaces the system's authorities. None: there is none."""

    key: str | None = None
    authority: Path | None = None

    @staticmethod
    def given(key: str | None, authority: Path | None) -> Access:
        """Of options. Raises ConfigError for a key that no header can carry, and for what is no certificate."""
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError("--api-key or BATON_API_KEY: has characters that no key has; `baton keys` prints one")
        access = Access(key or None, authority)
        if authority is not None:
            access.context()
        return access

    @property
    def headers(self) -> Mapping[str, str]:
        """Of every HTTP request, or the metadata of every call."""
        return {"authorization": f"Bearer {self.key}"} if self.key is not None else {}

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: a plain connection."""
        return None if self.authority is None else grpc.ssl_channel_credentials(self.authority.read_bytes())

    def client(self, address: str, retry: Retry | None = None) -> Client:
        """Inside an event loop."""
        metadata = tuple(self.headers.items())
        return Client(address, retry=retry, credentials=self.credentials, metadata=metadata)

    def connection(self, origin: Origin) -> HttpConnection:
        """Not yet open."""
        return HttpConnection(origin, self.headers, self.context() if origin.secure else None)

    def context(self) -> ssl.SSLContext:
        """Of https. Raises ConfigError for what is no certificate."""
        try:
            return ssl.create_default_context(cafile=self.authority)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"--tls-ca: {self.authority}: {error.strerror or error}") from None


NOBODY = Access()
