"""The commands of a cluster's operators, `status`, `keys`, `drain`, `scale` and `role`: options and what follows from
them; cli.py makes them commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    DEFAULT_ADMIN,
    AdminOption,
    AuthorityOption,
    JsonOption,
    KeyOption,
    PeerOption,
    peer_files,
)
from .output import say


def status(
    address: AdminOption = DEFAULT_ADMIN,
    request: Annotated[
        str, typer.Option("--request", metavar="ID", help="what happened to this request (x-request-id) instead")
    ] = "",
    json_: JsonOption = False,
    config: PeerOption = None,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
) -> None:
    """Show the workers of a running cluster, or the story of one request."""
    from .access import Access
    from .admin import show_status, show_story

    access, files = Access.given(api_key, tls_ca), peer_files(config)
    if request:
        raise typer.Exit(show_story(address, request, json_, files, access))
    raise typer.Exit(show_status(address, json_, files))


def keys(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="who the key is for")],
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="what router.tenants names")] = Path(
        "tenants.yaml"
    ),
) -> None:
    """Make an API key: it is printed once, and its hash is added to the file of tenants."""
    from .tenants import make_key

    say(make_key(tenant, file))


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    address: AdminOption = DEFAULT_ADMIN,
    config: PeerOption = None,
) -> None:
    """Let a worker finish its requests, then stop it; its pool gets smaller."""
    from .admin import drain as run_drain

    raise typer.Exit(run_drain(address, worker, peer_files(config)))


def scale(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="prefill or decode")],
    replicas: Annotated[int, typer.Argument(metavar="N", min=1)],
    address: AdminOption = DEFAULT_ADMIN,
    config: PeerOption = None,
) -> None:
    """Change the number of workers of a pool; those that leave are drained first."""
    from .admin import scale as run_scale

    raise typer.Exit(run_scale(address, pool, replicas, peer_files(config)))


def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    role: Annotated[str, typer.Argument(metavar="prefill|decode")],
    address: AdminOption = DEFAULT_ADMIN,
    config: PeerOption = None,
) -> None:
    """Ask a worker to change its role."""
    from .admin import set_role

    raise typer.Exit(set_role(address, worker, role, peer_files(config)))
