"""TLS at the front doors: with `client_ca` every client must show a certificate of that authority."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from ..proto.errors import ConfigError
from .params import FrontTLS


def grpc_credentials(files: FrontTLS) -> grpc.ServerCredentials:
    """For the gRPC port. Raises ConfigError when a file cannot be used."""
    uvicorn_options(files)  # OpenSSL says what is wrong with them; gRPC would only fail to listen
    key, certificate = Path(files.key).read_bytes(), Path(files.certificate).read_bytes()
    authority = Path(files.client_ca).read_bytes() if files.client_ca else None
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=authority is not None)


def uvicorn_options(files: FrontTLS | None) -> dict[str, Any]:
    """For the HTTP port. Raises ConfigError likewise."""
    if files is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # without a password callback an encrypted key would ask on the terminal
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
        if files.client_ca:
            context.load_verify_locations(cafile=files.client_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"router.tls: certificate {files.certificate} with key {files.key}: {error}") from error
    options: dict[str, Any] = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    if files.client_ca:
        options |= {"ssl_ca_certs": files.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
