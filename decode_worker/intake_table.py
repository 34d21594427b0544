"""A leg's way into a decode worker as a table: (state, event) -> next state. Whatever is not in it changes nothing.

    WAITING -> RESERVED -> COVERED or SAMPLED -> COMPLETE -> COMMITTED

What each state holds is in intake.py. COMMITTED and GONE are terminal: the intake forgets the leg.
"""

from __future__ import annotations

from enum import Enum


class IntakeState(Enum):
    """Where a leg is."""

    WAITING = "waiting"  # in the line; holds nothing
    RESERVED = "reserved"  # holds blocks; nothing has come to its end
    COVERED = "covered"  # all ranks hold all KV
    SAMPLED = "sampled"  # the first tokens are here
    COMPLETE = "complete"  # both
    COMMITTED = "committed"  # the batch has the blocks
    GONE = "gone"  # its blocks were given back


class IntakeEvent(Enum):
    """What can happen to it."""

    BLOCKS = "blocks and seats are free"
    KV = "the last rank holds all KV"
    FIRST_TOKENS = "first tokens"
    TAKE = "the batch takes it"
    END = "cancel, failure, clock or end of the session"


_S, _E = IntakeState, IntakeEvent

TABLE: dict[tuple[IntakeState, IntakeEvent], IntakeState] = {
    (_S.WAITING, _E.BLOCKS): _S.RESERVED,
    (_S.WAITING, _E.END): _S.GONE,
    (_S.RESERVED, _E.KV): _S.COVERED,
    (_S.RESERVED, _E.FIRST_TOKENS): _S.SAMPLED,
    (_S.RESERVED, _E.END): _S.GONE,
    (_S.COVERED, _E.FIRST_TOKENS): _S.COMPLETE,
    (_S.COVERED, _E.END): _S.GONE,
    (_S.SAMPLED, _E.KV): _S.COMPLETE,
    (_S.SAMPLED, _E.END): _S.GONE,
    (_S.COMPLETE, _E.TAKE): _S.COMMITTED,
}
