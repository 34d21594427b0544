"""TLS 1.3 on links, both ends proven by a certificate of the cluster's own authority.

Host names are not compared: ranks are named by address, the authority is private to the cluster, and it is the ticket
that says which worker is meant.
"""

from __future__ import annotations

import ssl

from ..proto.errors import ConfigError
from .params import TLSFiles


def client_context(files: TLSFiles | None) -> ssl.SSLContext | None:
    """For the end that dials; None for None. Raises ConfigError when a file cannot be used."""
    return None if files is None else _context(files, ssl.PROTOCOL_TLS_CLIENT)


def server_context(files: TLSFiles | None) -> ssl.SSLContext | None:
    """For the end that listens; None for None. Raises ConfigError when a file cannot be used."""
    return None if files is None else _context(files, ssl.PROTOCOL_TLS_SERVER)


def _context(files: TLSFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # without a password callback an encrypted key would ask on the terminal
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv.tls: certificate {files.certificate} with key {files.key}: {error}") from error
    try:
        context.load_verify_locations(cafile=files.ca)
    except OSError as error:
        raise ConfigError(f"kv.tls: ca {files.ca}: {error}") from error
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing resumes a session, and a peer would have to read them
    return context
