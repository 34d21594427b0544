"""What is simulated: two pools, the way between them, the router's rules, and what happens to workers meanwhile.

Times in seconds, lengths in tokens. `setup.py` makes one from a configuration and its cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...proto.step_time import StepTime
from ...router.placement.choose import Objectives
from ...router.placement.disaggregation import ALWAYS, NEVER

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Workers that compute prompts. `law`: of a step, `proto/step_time.py`."""

    replicas: int
    law: StepTime
    blocks: int  # of a worker's KV pool
    max_batch_tokens: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class DecodePool:
    """Workers that generate."""

    replicas: int
    law: StepTime
    blocks: int
    max_sequences: int
    prompt_chunk: int = 128  # tokens of prompts that are computed here, in one step beside the batch


class Transfer(Protocol):
    """How long the KV of a prompt is on its way after the prompt is computed."""

    def exposed_s(self, tokens: int, computed_s: float) -> float:
        """`tokens` are sent, layer by layer, while `computed_s` pass."""
        ...


@dataclass(frozen=True, slots=True)
class LayeredTransfer:
    """Each of `groups` groups of layers is sent while the next is computed, or all at the end where that is sooner.

    N messages, each computed in p and moved in x = alpha + bytes/(N*beta): what is left behind the computing is
    max(x, N*x - (N - 1)*p); at once it is alpha + bytes/beta.
    """

    alpha_s: float  # of a message
    token_s: float  # bytes of KV of a token / bytes a second
    groups: int

    def exposed_s(self, tokens: int, computed_s: float) -> float:
        """See Transfer."""
        moved = tokens * self.token_s
        each = self.alpha_s + moved / self.groups
        hidden = (self.groups - 1) * computed_s / self.groups
        return min(max(each, self.groups * each - hidden), self.alpha_s + moved)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What is neither computing nor moving KV."""

    router_s: float = 0.0  # from the client's send to the placement, and from a token at the router to the client, both
    message_s: float = 0.0  # one way between router and worker, with the handling at both ends


@dataclass(frozen=True, slots=True)
class Rules:
    """The router's and the intake's; names as in `router/placement/choose.py`."""

    prefill_placement: str
    decode_placement: str
    prefix_events: bool
    objectives: Objectives
    max_inflight: int
    reserve_wait_s: float
    commit_timeout_s: float
    request_s: float  # deadline
    attempts: int
    disaggregation: str = ALWAYS  # in `router/placement/disaggregation.py`


@dataclass(frozen=True, slots=True)
class Fail:
    """A worker dies, and is ready again, empty, after `down_s`; None: never."""

    at: float
    worker: str
    down_s: float | None


@dataclass(frozen=True, slots=True)
class Switch:
    """A worker takes no more requests, ends those it has, and is ready in the other pool `takes_s` later."""

    at: float
    worker: str
    takes_s: float


@dataclass(frozen=True, slots=True)
class Scale:
    """A pool gets so many workers: new ones are ready after `takes_s`, those that leave end what they have."""

    at: float
    role: Role
    replicas: int
    takes_s: float


Change = Fail | Switch | Scale


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything but the requests. `prefix_cache` needs requests of known contents. `noise`: half the width of the
    uniform relative error of steps."""

    prefill: PrefillPool
    decode: DecodePool
    block_size: int
    transfer: Transfer
    rules: Rules
    overheads: Overheads = Overheads()
    prefix_cache: bool = True
    noise: float = 0.0
    changes: Sequence[Change] = field(default=())
    aggregated: bool = False  # workers of the decode pool compute prompts too, and there are no others. A step that
    # does both takes what the decode law says and b and c of the prefill law more, also where `rules` let it
    sample_s: float | None = None  # between two rows of the timeline; None: there is none

    @property
    def disaggregation(self) -> str:
        """Where prompts are computed."""
        return NEVER if self.aggregated else self.rules.disaggregation

    @property
    def prompt_chunk(self) -> int:
        """Prompt tokens of a step of the decode pool."""
        return self.prefill.max_batch_tokens if self.aggregated else self.decode.prompt_chunk
