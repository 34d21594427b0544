"""Failures of the cluster as a whole, told apart from those of one request."""

from __future__ import annotations

from ..proto.errors import BatonError, Unauthenticated

KEY_HINT = "give a tenant's in BATON_API_KEY or with --api-key (`baton keys` makes one)"


class CommandFailed(Exception):
    """A command cannot go on; the message is all that its user needs."""


class StartFailed(CommandFailed):
    """The cluster could not be started; the message says what failed and why."""


class AddressTaken(StartFailed):
    """A port cannot be bound; the message names the key and the address."""


class OutputFailed(CommandFailed):
    """Results cannot be written: the disk is full, or the reader is gone."""


class Refused(Exception):
    """An administrator's wish that cannot be fulfilled; the message says why."""


def port_hint(key: str, host: str) -> str:
    """What to do about a taken port; `key`: router.grpc and so on."""
    return f"--set {key}={host}:0 takes a free port, --address uses the cluster that runs already"


def error_text(error: BatonError) -> str:
    """For people: the field, the message, the hint."""
    named = not error.field or error.message.startswith(f"{error.field}:")
    field = "" if named else f"{error.field}: "
    retry = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
    hint = f" ({KEY_HINT})" if isinstance(error, Unauthenticated) else ""
    return f"{error.code}: {field}{error.message}{retry}{hint}"
