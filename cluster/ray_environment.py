"""Environment variables that Ray reads when it is first imported; set by whoever is about to import launcher_ray."""

from __future__ import annotations

import os
import secrets

from ..proto.errors import ConfigError

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


def prepare(address: str) -> None:
    """For a private local Ray make a token; a running cluster must ask for one. Raises ConfigError if it does not."""
    if address == "local":
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"cluster.address: a Ray cluster ({address}) is joined only with token authentication; set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here and on its nodes"
        )
    os.environ.update(_QUIET)
