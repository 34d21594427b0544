"""TLS on the cluster's own gRPC connections (sessions, membership, administration): both ends prove themselves.

Processes are reached by address, so one name is checked instead, which all certificates of the cluster carry.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from .errors import ConfigError

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class PeerTLS:
    """Paths of PEM files. ca: whom the other end's certificate must come from; name: a DNS name that it must carry."""

    certificate: str
    key: str
    ca: str
    name: str


def check(files: PeerTLS) -> None:
    """One handshake in memory. Raises ConfigError unless two ends with these files accept each other: gRPC would only
    say that it cannot connect."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _context(files, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_client, to_server, server_hostname=files.name)
    server = _context(files, ssl.PROTOCOL_TLS_SERVER).wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise ConfigError(f"cluster.tls: certificate {files.certificate}: {error}") from error


def _context(files: PeerTLS, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # without a password callback an encrypted key would ask on the terminal
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cluster.tls: certificate {files.certificate} with key {files.key}: {error}") from error
    try:
        context.load_verify_locations(cafile=files.ca)
    except OSError as error:
        raise ConfigError(f"cluster.tls: ca {files.ca}: {error}") from error
    return context


def channel(address: str, files: PeerTLS | None, options: Options) -> grpc.aio.Channel:
    """To one of our own services; None: a plain connection."""
    if files is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(files), options=_named(files, options))


def blocking_channel(address: str, files: PeerTLS | None) -> grpc.Channel:
    """The same, outside an event loop."""
    if files is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, _credentials(files), options=_named(files, ()))


def add_port(server: grpc.aio.Server, address: str, files: PeerTLS | None) -> int:
    """Listens; the port, as gRPC's own add_insecure_port. Raises RuntimeError when it is taken."""
    if files is None:
        return int(server.add_insecure_port(address))
    pair = Path(files.key).read_bytes(), Path(files.certificate).read_bytes()
    ca = Path(files.ca).read_bytes()
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair], ca, require_client_auth=True)))


def _credentials(files: PeerTLS) -> grpc.ChannelCredentials:
    ca, key, certificate = (Path(path).read_bytes() for path in (files.ca, files.key, files.certificate))
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _named(files: PeerTLS, options: Options) -> Options:
    return [*options, ("grpc.ssl_target_name_override", files.name)]
