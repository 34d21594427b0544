"""The life of one leg as a table: (state, event) -> next state and what to do. Whatever is not in it changes nothing.

A leg is one pass of a request through a prefill worker P and, unless P's first token is all that is wanted, a decode
worker D.

    PLACING -> QUEUED -> RESERVING -> PREFILLING -> HANDOVER -> DECODING -> OVER

Where D computes the prompt itself, no P takes part (placement/disaggregation.py):

    PLACING -> COMPUTING -> DECODING -> OVER

A leg may also begin with KV that exists: P computed it, or is computing it, for a leg whose D was lost before it
committed; or a decode worker took the choice out of its batch for it (migration). In both cases that worker is the
leg's source, and nothing is prefilled:

    REPLACING -> REBOOKING -> RESENDING -> DECODING -> OVER

Where the source is lost before D's word on whether it has all KV comes, D is asked for it:

    PREFILLING, HANDOVER, RESENDING -> ASKING -> DECODING, or OVER and again

Who holds what: in RESERVING, COMPUTING, REBOOKING and later D may hold a reservation; in PREFILLING, HANDOVER and
RESENDING the source holds the KV until it is told to release or cancel; in REPLACING and REBOOKING it holds the KV too,
under the key of the leg before; in DECODING only D holds anything.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LegState(Enum):
    """Where a leg is."""

    PLACING = "placing"  # no workers chosen yet
    QUEUED = "queued"  # in the router, until P is about to run it
    RESERVING = "reserving"  # D was asked for blocks
    PREFILLING = "prefilling"  # P has the prompt; no token yet
    HANDOVER = "handover"  # first token out, D has not committed
    COMPUTING = "computing"  # D was asked for blocks, and to compute the prompt in them
    REPLACING = "replacing"  # the source holds the KV; no D chosen yet
    REBOOKING = "rebooking"  # that D was asked for blocks
    RESENDING = "resending"  # the source was told to send to it; D has not committed
    ASKING = "asking"  # the source is lost; D was asked whether it has all KV
    DECODING = "decoding"  # D has the KV; the source was released
    OVER = "over"


class LegEvent(Enum):
    """What can happen to a leg. GONE: failed there in a way that may be tried again, or the worker was lost."""

    PLACED = "placed"
    PLACED_TOGETHER = "placed, D computes"
    LET_THROUGH = "let through"
    LET_THROUGH_ALONE = "let through, no decode worker needed"
    TICKET = "ticket"
    FIRST_TOKENS = "first tokens"
    SENT = "sent"
    UNSENT = "unsent"  # the source cannot reach D, or was not told that D has everything; it keeps the KV
    UNANSWERED = "no answer"  # D does not say whether it has everything
    COMMITTED = "committed"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    HOLD = "hold"  # a choice is to move to another D
    NO_PLACE = "no place"  # no D can take the KV
    HELD = "held"  # D took it out of its batch, and keeps its KV for the move
    PREFILL_GONE = "prefill gone"
    PREFILL_LOST = "prefill lost"  # with its session, when D may have all KV
    DECODE_GONE = "decode gone"
    FINISHED = "finished"  # every choice ended, and the workers know
    STOPPED = "stopped"  # every choice ended, at least one by the router's decision
    DROP = "drop"  # the request ended: cancel, deadline, failure


class Do(Enum):
    """What a transition asks for."""

    PLACE = "choose workers"
    ENTER_GATE = "wait for the prefill worker's lookahead"
    RESERVE = "ask D for blocks"
    PREFILL = "send P the prompt"
    COMPUTE = "D computes the prompt, once it has blocks"
    EMIT = "give the tokens to the client"
    RELEASE_PREFILL = "P may free the prompt's blocks"
    CANCEL_PREFILL = "P forgets the leg"
    CANCEL_DECODE = "D forgets the leg"
    CANCEL_HELD = "the source forgets what it holds for the leg, under the key of the leg before"
    HAND_OVER = "tell the source to send what it holds to D, under this leg"
    WITHDRAW = "ask D whether it has all KV; it fails the leg if not"
    RESEND = "go on with what the source holds to another D"
    HOLD = "D takes the choice out of its batch"
    MOVE = "give the choice that left the batch a leg of its own"
    AGAIN = "repeat what this leg has not finished"


class Rule(NamedTuple):
    """One row's right side."""

    state: LegState
    actions: tuple[Do, ...] = ()


_S, _E = LegState, LegEvent
_BOTH = (Do.CANCEL_PREFILL, Do.CANCEL_DECODE)
_HELD_BOTH = (Do.CANCEL_HELD, Do.CANCEL_DECODE)

TABLE: dict[tuple[LegState, LegEvent], Rule] = {
    (_S.PLACING, _E.PLACED): Rule(_S.QUEUED, (Do.ENTER_GATE,)),
    (_S.PLACING, _E.PLACED_TOGETHER): Rule(_S.COMPUTING, (Do.COMPUTE,)),
    (_S.PLACING, _E.STOPPED): Rule(_S.OVER),
    (_S.PLACING, _E.DROP): Rule(_S.OVER),
    #
    (_S.QUEUED, _E.LET_THROUGH): Rule(_S.RESERVING, (Do.RESERVE,)),
    (_S.QUEUED, _E.LET_THROUGH_ALONE): Rule(_S.PREFILLING, (Do.PREFILL,)),
    (_S.QUEUED, _E.PREFILL_GONE): Rule(_S.PLACING, (Do.PLACE,)),  # nothing was sent: not a retry
    (_S.QUEUED, _E.DECODE_GONE): Rule(_S.PLACING, (Do.PLACE,)),
    (_S.QUEUED, _E.STOPPED): Rule(_S.OVER),
    (_S.QUEUED, _E.DROP): Rule(_S.OVER),
    #
    (_S.RESERVING, _E.TICKET): Rule(_S.PREFILLING, (Do.PREFILL,)),
    (_S.RESERVING, _E.PREFILL_GONE): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.RESERVING, _E.DECODE_GONE): Rule(_S.OVER, (Do.AGAIN,)),
    (_S.RESERVING, _E.STOPPED): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    (_S.RESERVING, _E.DROP): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    #
    (_S.PREFILLING, _E.FIRST_TOKENS): Rule(_S.HANDOVER, (Do.EMIT,)),
    (_S.PREFILLING, _E.SENT): Rule(_S.PREFILLING),
    (_S.PREFILLING, _E.COMMITTED): Rule(_S.DECODING, (Do.RELEASE_PREFILL,)),  # D's news overtook P's
    (_S.PREFILLING, _E.PREFILL_GONE): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.PREFILLING, _E.PREFILL_LOST): Rule(_S.ASKING, (Do.WITHDRAW,)),
    (_S.PREFILLING, _E.DECODE_GONE): Rule(_S.OVER, (Do.RESEND,)),
    (_S.PREFILLING, _E.UNSENT): Rule(_S.PREFILLING, (Do.WITHDRAW,)),  # COMMITTED or DECODE_GONE follows
    (_S.PREFILLING, _E.UNANSWERED): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.RESEND)),
    (_S.PREFILLING, _E.STOPPED): Rule(_S.OVER, _BOTH),
    (_S.PREFILLING, _E.DROP): Rule(_S.OVER, _BOTH),
    #
    (_S.HANDOVER, _E.SENT): Rule(_S.HANDOVER),
    (_S.HANDOVER, _E.COMMITTED): Rule(_S.DECODING, (Do.RELEASE_PREFILL,)),
    (_S.HANDOVER, _E.PREFILL_GONE): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.HANDOVER, _E.PREFILL_LOST): Rule(_S.ASKING, (Do.WITHDRAW,)),
    (_S.HANDOVER, _E.DECODE_GONE): Rule(_S.OVER, (Do.RESEND,)),
    (_S.HANDOVER, _E.UNSENT): Rule(_S.HANDOVER, (Do.WITHDRAW,)),  # COMMITTED or DECODE_GONE follows
    (_S.HANDOVER, _E.UNANSWERED): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.RESEND)),
    (_S.HANDOVER, _E.FINISHED): Rule(_S.OVER, (Do.RELEASE_PREFILL, Do.CANCEL_DECODE)),
    (_S.HANDOVER, _E.STOPPED): Rule(_S.OVER, _BOTH),
    (_S.HANDOVER, _E.DROP): Rule(_S.OVER, _BOTH),
    #
    (_S.COMPUTING, _E.FIRST_TOKENS): Rule(_S.COMPUTING, (Do.EMIT,)),
    (_S.COMPUTING, _E.COMMITTED): Rule(_S.DECODING),
    (_S.COMPUTING, _E.DECODE_GONE): Rule(_S.OVER, (Do.AGAIN,)),
    (_S.COMPUTING, _E.FINISHED): Rule(_S.OVER),
    (_S.COMPUTING, _E.STOPPED): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    (_S.COMPUTING, _E.DROP): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    #
    (_S.REPLACING, _E.PLACED): Rule(_S.REBOOKING, (Do.RESERVE,)),
    (_S.REPLACING, _E.FIRST_TOKENS): Rule(_S.REPLACING, (Do.EMIT,)),  # of the leg before
    (_S.REPLACING, _E.PREFILL_GONE): Rule(_S.OVER, (Do.AGAIN,)),
    (_S.REPLACING, _E.NO_PLACE): Rule(_S.OVER, (Do.CANCEL_HELD, Do.AGAIN)),
    (_S.REPLACING, _E.STOPPED): Rule(_S.OVER, (Do.CANCEL_HELD,)),
    (_S.REPLACING, _E.DROP): Rule(_S.OVER, (Do.CANCEL_HELD,)),
    #
    (_S.REBOOKING, _E.TICKET): Rule(_S.RESENDING, (Do.HAND_OVER,)),
    (_S.REBOOKING, _E.FIRST_TOKENS): Rule(_S.REBOOKING, (Do.EMIT,)),  # likewise
    (_S.REBOOKING, _E.PREFILL_GONE): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.REBOOKING, _E.DECODE_GONE): Rule(_S.OVER, (Do.RESEND,)),
    (_S.REBOOKING, _E.STOPPED): Rule(_S.OVER, _HELD_BOTH),
    (_S.REBOOKING, _E.DROP): Rule(_S.OVER, _HELD_BOTH),
    #
    (_S.RESENDING, _E.FIRST_TOKENS): Rule(_S.RESENDING, (Do.EMIT,)),
    (_S.RESENDING, _E.SENT): Rule(_S.RESENDING),
    (_S.RESENDING, _E.COMMITTED): Rule(_S.DECODING, (Do.RELEASE_PREFILL,)),
    (_S.RESENDING, _E.PREFILL_GONE): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.RESENDING, _E.PREFILL_LOST): Rule(_S.ASKING, (Do.WITHDRAW,)),
    (_S.RESENDING, _E.DECODE_GONE): Rule(_S.OVER, (Do.RESEND,)),
    (_S.RESENDING, _E.UNSENT): Rule(_S.RESENDING, (Do.WITHDRAW,)),  # COMMITTED or DECODE_GONE follows
    (_S.RESENDING, _E.UNANSWERED): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.RESEND)),
    (_S.RESENDING, _E.FINISHED): Rule(_S.OVER, (Do.RELEASE_PREFILL, Do.CANCEL_DECODE)),
    (_S.RESENDING, _E.STOPPED): Rule(_S.OVER, _BOTH),
    (_S.RESENDING, _E.DROP): Rule(_S.OVER, _BOTH),
    #
    (_S.ASKING, _E.COMMITTED): Rule(_S.DECODING),
    (_S.ASKING, _E.DECODE_GONE): Rule(_S.OVER, (Do.AGAIN,)),
    (_S.ASKING, _E.UNANSWERED): Rule(_S.OVER, (Do.CANCEL_DECODE, Do.AGAIN)),
    (_S.ASKING, _E.STOPPED): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    (_S.ASKING, _E.DROP): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    #
    (_S.DECODING, _E.FIRST_TOKENS): Rule(_S.DECODING, (Do.EMIT,)),
    (_S.DECODING, _E.SENT): Rule(_S.DECODING),
    (_S.DECODING, _E.UNSENT): Rule(_S.DECODING),
    (_S.DECODING, _E.TOKENS): Rule(_S.DECODING, (Do.EMIT,)),
    (_S.DECODING, _E.PREEMPTED): Rule(_S.DECODING, (Do.MOVE,)),
    (_S.DECODING, _E.HOLD): Rule(_S.DECODING, (Do.HOLD,)),
    (_S.DECODING, _E.HELD): Rule(_S.DECODING, (Do.MOVE,)),
    (_S.DECODING, _E.PREFILL_GONE): Rule(_S.DECODING),
    (_S.DECODING, _E.DECODE_GONE): Rule(_S.OVER, (Do.AGAIN,)),
    (_S.DECODING, _E.FINISHED): Rule(_S.OVER),
    (_S.DECODING, _E.STOPPED): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
    (_S.DECODING, _E.DROP): Rule(_S.OVER, (Do.CANCEL_DECODE,)),
}

# the leg still counts against the lookahead of whoever computes its prompt
AT_PREFILL = frozenset({_S.QUEUED, _S.RESERVING, _S.PREFILLING, _S.COMPUTING})
