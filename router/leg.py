"""One leg of a request, and the commands that its table asks for, as far as the leg alone decides them."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import life_messages as m
from .leg_table import Do, LegState
from .life_messages import Action, LegKey, Peer


@dataclass(slots=True)
class Leg:
    """One pass through a prefill and a decode worker. `tries`: failed passes before it that led to it."""

    key: LegKey
    choices: list[int]
    tries: int
    needs_decode: bool
    avoid: frozenset[Peer]
    generated: list[int]  # output of the only choice that its KV begins with, beside the prompt; [] for a first pass
    state: LegState = LegState.PLACING
    prefill: Peer | None = None  # the source of the KV: D1 too, when a choice moves; None: D computes the prompt
    decode: Peer | None = None
    ticket: bytes = b""
    held: LegKey | None = None  # under which key the source knows the KV; None: there is none yet
    resent: bool = False  # it began with KV that existed
    source_lost: bool = False  # and D has not said that it has all KV
    holding: set[int] = field(default_factory=set)  # choices that D was told to take out of its batch


def command(do: Do, leg: Leg) -> list[Action]:
    """What a transition of the leg has a worker told; [] for what concerns no worker, or one that takes no part."""
    match do:
        case Do.RESERVE if leg.decode:
            return [m.Reserve(leg.key, leg.decode)]
        case Do.COMPUTE if leg.decode:
            return [m.Reserve(leg.key, leg.decode, compute=True)]
        case Do.PREFILL if leg.prefill:
            leg.held = leg.key
            return [m.Prefill(leg.key, leg.prefill, leg.ticket)]
        case Do.HAND_OVER if leg.prefill and leg.held:
            held, leg.held = leg.held, leg.key
            return [m.HandOver(leg.key, leg.prefill, leg.ticket, held)]
        case Do.RELEASE_PREFILL if leg.prefill:
            return [m.ReleaseLeg(leg.key, leg.prefill)]
        case Do.CANCEL_PREFILL if leg.prefill:
            return [m.CancelLeg(leg.key, leg.prefill)]
        case Do.CANCEL_HELD if leg.prefill and leg.held:
            return [m.CancelHeld(leg.held, leg.prefill, tuple(leg.choices))]
        case Do.CANCEL_DECODE if leg.decode:
            return [m.CancelLeg(leg.key, leg.decode)]
    return []
