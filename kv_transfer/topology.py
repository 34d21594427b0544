"""Which carrier a link uses (pure), from what both ends ask for and where their pools are."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

AUTO, INLINE, SHM, GLOO, NCCL, CUDA_IPC = "auto", "inline", "shm", "gloo", "nccl", "cuda_ipc"
_MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's pool is. Two ranks with the same `host` share a kernel and a network namespace."""

    host: str
    device: str  # cpu | cuda

    def pack(self) -> list[str]:
        """As it travels in a hello."""
        return [self.host, self.device]

    @staticmethod
    def unpack(data: Any) -> Place:
        """The inverse of `pack`. Raises ValueError."""
        if not isinstance(data, list) or [type(part) for part in data] != [str, str]:
            raise ValueError("not a place")
        if any(len(part) > _MAX_TEXT for part in data):
            raise ValueError("not a place: too long")
        return Place(*data)


def place_here(device: str) -> Place:
    """The place of a pool on `device` in this process. A host that cannot be told is like no other."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return Place(f"{boot} {os.readlink('/proc/self/ns/net')}", device)
    except OSError:
        return Place(f"unknown {secrets.token_hex(16)}", device)


def choose(prefill: tuple[str, Place], decode: tuple[str, Place], encrypted: bool) -> tuple[str, str]:
    """The carrier for a link between two ends, each (its kv.transport, its place), and why it is not what was asked.

    The reason is empty when the carrier is what a side named, or what `auto` gives by itself.
    """
    wanted, reason = _wanted(prefill[0], decode[0])
    if reason:
        return INLINE, reason
    if wanted == AUTO:
        return (INLINE if encrypted else _best(prefill[1], decode[1])), ""
    if problem := _problem(wanted, prefill[1], decode[1], encrypted):
        return INLINE, f"{wanted} is not possible: {problem}"
    return wanted, ""


def _wanted(prefill: str, decode: str) -> tuple[str, str]:
    """What both agree on; who says `auto` follows the other."""
    if AUTO in (prefill, decode):
        return (decode if prefill == AUTO else prefill), ""
    if prefill != decode:
        return INLINE, f"prefill wants {prefill}, decode wants {decode}"
    return prefill, ""


def _best(prefill: Place, decode: Place) -> str:
    devices = {prefill.device, decode.device}
    if devices == {"cuda"}:
        return NCCL
    return SHM if devices == {"cpu"} and prefill.host == decode.host else INLINE


def _problem(carrier: str, prefill: Place, decode: Place, encrypted: bool) -> str:
    """Why a carrier cannot serve these two places; empty when it can."""
    if carrier not in (INLINE, SHM, GLOO, NCCL, CUDA_IPC):
        return "no such carrier"
    if encrypted and carrier != INLINE:
        return "it does not encrypt, and kv.tls is set"
    device = {SHM: "cpu", NCCL: "cuda", CUDA_IPC: "cuda"}.get(carrier)
    for side, place in (("prefill", prefill), ("decode", decode)):
        if device is not None and place.device != device:
            return f"the pool of {side} is on {place.device}"
    if carrier in (SHM, CUDA_IPC) and prefill.host != decode.host:
        return "the two ranks are not on the same host"
    return ""
