"""Failures of the cluster as a whole, told apart from those of one request."""

from __future__ import annotations


class StartFailed(Exception):
    """The cluster could not be started; the message says what failed and why."""


class AddressTaken(StartFailed):
    """A port cannot be bound; the message names the key and the address."""


class Refused(Exception):
    """An administrator's wish that cannot be fulfilled; the message says why."""
