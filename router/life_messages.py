"""What goes into a request's life (events) and what comes out of it (actions); see request_life.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError


class Peer(NamedTuple):
    """One incarnation of one worker."""

    worker_id: str
    incarnation: str


class LegKey(NamedTuple):
    """Names a leg within its request."""

    attempt: int
    first_choice: int


# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """Workers were chosen. `decode` is None when the leg needs none, `prefill` when `decode` computes the prompt."""

    leg: LegKey
    prefill: Peer | None
    decode: Peer | None


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No worker can take the leg."""

    leg: LegKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class LetThrough:
    """The prefill worker is about to have room for the prompt."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class Ticketed:
    """The decode worker reserved blocks."""

    leg: LegKey
    peer: Peer
    ticket: bytes


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Whoever computed the prompt sampled one token for each choice of the leg."""

    leg: LegKey
    peer: Peer
    tokens: Sequence[pb.Token]


@dataclass(frozen=True, slots=True)
class Sent:
    """The prefill worker's frames were all acknowledged."""

    leg: LegKey
    peer: Peer


@dataclass(frozen=True, slots=True)
class Unsent:
    """The source cannot send the leg's KV to where it should go; it keeps it."""

    leg: LegKey
    peer: Peer
    error: BatonError


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The decode worker did not say in time whether it has all KV of a leg that was Unsent for this reason."""

    leg: LegKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prefill worker asks for the prefix that the decode worker holds; the ticket is its own."""

    leg: LegKey
    peer: Peer
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """The decode worker has the whole KV and goes on from it."""

    leg: LegKey
    peer: Peer


@dataclass(frozen=True, slots=True)
class Tokens:
    """The decode worker's tokens of one step, of one attempt."""

    attempt: int
    peer: Peer
    tokens: Sequence[pb.Token]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The decode worker took the choice's blocks away."""

    leg: LegKey
    peer: Peer
    choice: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """The choice is to go on at another decode worker."""

    leg: LegKey
    choice: int


@dataclass(frozen=True, slots=True)
class Held:
    """The decode worker took the choice out of its batch, and keeps its KV."""

    leg: LegKey
    peer: Peer
    choice: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The leg is over at that worker."""

    leg: LegKey
    peer: Peer
    error: BatonError


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session with that incarnation ended: whatever it held for us is gone."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string ended the choice."""

    choice: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request must end: the client left, its deadline passed, or we failed. The error says which."""

    error: BatonError


Event = (
    Placed
    | Unplaceable
    | LetThrough
    | Ticketed
    | FirstTokens
    | Sent
    | Unsent
    | Unanswered
    | Wanted
    | Committed
    | Tokens
    | Preempted
    | Migrate
    | Held
    | Failed
    | WorkerLost
    | StopMatched
    | GiveUp
)

# ---- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Choose workers, `after_s` from now, then report Placed or Unplaceable. Those in `avoid` are the last choice; with
    `refused` set they are none, and `refused` is then the reason to report. `cause`: first | again (a worker
    was lost before it was told) | retry | preempted | moved | recompute (of KV that turned out not to be there any
    more).
    `source`: the worker that has the leg's KV already; only a decode worker, another one, is then chosen."""

    leg: LegKey
    cause: str
    needs_decode: bool
    prefer: Peer | None
    avoid: frozenset[Peer]
    refused: BatonError | None
    after_s: float = 0.0
    source: Peer | None = None

    @property
    def patient(self) -> bool:
        """Whether the leg waits for a worker where none is ready: a request that was never placed is refused, and the
        KV that a source holds is not kept for that long."""
        return self.cause != "first" and self.source is None


@dataclass(frozen=True, slots=True)
class EnterGate:
    """Report LetThrough when `peer` is within its lookahead of running the leg's `tokens` tokens."""

    leg: LegKey
    peer: Peer
    tokens: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the decode worker for blocks; compute: and to compute the prompt."""

    leg: LegKey
    peer: Peer
    compute: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Send the prompt; an empty ticket means that no decode worker takes part."""

    leg: LegKey
    peer: Peer
    ticket: bytes


@dataclass(frozen=True, slots=True)
class HandOver:
    """Tell the source to send, as this leg and to where the ticket says, the KV that it knows under `held`."""

    leg: LegKey
    peer: Peer
    ticket: bytes
    held: LegKey


@dataclass(frozen=True, slots=True)
class HoldChoice:
    """Tell the decode worker to take the choice out of its batch and to keep its KV."""

    leg: LegKey
    peer: Peer
    choice: int


@dataclass(frozen=True, slots=True)
class GivePrefix:
    """Tell the decode worker to send its cached prefix to where the ticket says."""

    leg: LegKey
    peer: Peer
    ticket: bytes


@dataclass(frozen=True, slots=True)
class WithdrawLeg:
    """Tell the decode worker that no more KV comes, and why; report Unanswered if it says nothing to that."""

    leg: LegKey
    peer: Peer
    error: BatonError


@dataclass(frozen=True, slots=True)
class CancelHeld:
    """Tell the source to forget these choices of what it knows under `leg`, whose KV was to be sent on."""

    leg: LegKey
    peer: Peer
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Tell the worker to forget the leg."""

    leg: LegKey
    peer: Peer


@dataclass(frozen=True, slots=True)
class CancelChoices:
    """Tell the decode worker to end these choices of a committed leg; its others go on."""

    leg: LegKey
    peer: Peer
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLeg:
    """Tell the source of the leg's KV that the blocks are no longer needed."""

    leg: LegKey
    peer: Peer


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens for the client, in order within each choice."""

    tokens: Sequence[pb.Token]


@dataclass(frozen=True, slots=True)
class PrefillOver:
    """The leg's prompt is computed, or will not be: it occupies nobody's compute any more."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class LegOver:
    """The leg occupies no worker any more."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class End:
    """The request is over: the one final message, or the one error."""

    error: BatonError | None


Command = (
    Reserve
    | Prefill
    | HandOver
    | HoldChoice
    | GivePrefix
    | WithdrawLeg
    | CancelLeg
    | CancelHeld
    | CancelChoices
    | ReleaseLeg
)
Action = Place | EnterGate | Command | Emit | PrefillOver | LegOver | End
