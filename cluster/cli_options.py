"""What several commands share: their options, the configuration that they load, and the cluster that they use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..proto.errors import ConfigError
from .output import say

if TYPE_CHECKING:
    from ..proto.peer_tls import PeerTLS
    from .config import Config

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The cluster's YAML file.", show_default=False)]
ConfigOption = Annotated[str | None, typer.Option("--config", metavar="CONFIG", help="Start this cluster for the job.")]
AddressOption = Annotated[str | None, typer.Option("--address", metavar="HOST:PORT", help="Use a running router.")]
AdminOption = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="The admin service (router.admin).")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the YAML.")]
PrintOption = Annotated[bool, typer.Option("--print-config", help="Print the resulting configuration and stop.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the workers log.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="BATON_API_KEY", metavar="KEY", help="Of a tenant, where there are any."),
]
AuthorityOption = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="FILE", help="PEM: whom a router with TLS has its certificate from.")
]
PeerOption = Annotated[
    str | None, typer.Option("--config", metavar="CONFIG", help="YAML whose cluster.tls gets to the admin service.")
]
DEFAULT_ADMIN = "127.0.0.1:50052"


def load_config(path: str, settings: list[str] | None, print_only: bool) -> Config:
    """The checked configuration; with --print-config the command ends here. Raises ConfigError."""
    from . import config_load

    config = config_load.load(path, settings or [])
    if print_only:
        say(config_load.show(config))
        raise typer.Exit(0)
    return config


def peer_files(config: str | None) -> PeerTLS | None:
    """The certificates with which the admin service is reached. Raises ConfigError."""
    from .spec import peer_tls

    return None if config is None else peer_tls(load_config(config, None, False))


def one_target(
    config: str | None,
    place: str | None,
    settings: list[str] | None,
    print_only: bool,
    option: Literal["--address", "--url"] = "--address",
) -> None:
    """Exactly one of --config and `option`, whose value is `place`: a usable one, and nothing beside it that needs
    --config. Raises ConfigError."""
    if (config is None) == (place is None):
        raise ConfigError(f"give either --config (start a cluster for this job) or {option} (use a running one)")
    if place is not None:
        check_place(option, place)
        for other, given in (("--set", bool(settings)), ("--print-config", print_only)):
            if given:
                raise ConfigError(f"{other} needs --config: the cluster at {option} has its configuration already")


def check_place(option: str, place: str) -> None:
    """Raises ConfigError for what is no address (or no URL, for --url)."""
    from .http_client import Origin
    from .units import split_address

    try:
        Origin.parse(place) if option == "--url" else split_address(place)
    except ValueError as error:
        raise ConfigError(f"{option}: {place}: {error}") from None


def warn(warnings: tuple[str, ...]) -> None:
    """Say what works but costs."""
    for warning in warnings:
        print(f"baton: warning: {warning}", file=sys.stderr)


def seconds(option: str, text: str | None) -> float | None:
    """A duration such as 250ms or 2h. Raises ConfigError."""
    from .units import parse_duration

    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text}: {error}") from None
