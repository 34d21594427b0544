"""How many tokens to propose for a sequence: a pure function of its recent acceptance and of the size of the batch.

**The law.** A step of a batch of B sequences costs a fixed part (the weights are read once), taken as 1, and `row` for
each row. With k proposals for each sequence it has B (1 + k) rows, and the proposing itself costs `draft` and B times
`draft_row` for each of the k. If a proposal stands with probability p when all before it do, a step says

    E(p, k) = 1 + p + ... + p^k tokens          (Leviathan et al., 2023, equation 1)

for each sequence. The k with the most tokens for its cost wins: as the batch grows the rows outweigh the fixed part,
and k falls to 0 by itself.

**Hysteresis.** A greater length must gain 5 % over the one at hand; a smaller one need only be better. A sequence whose
length is 0 proposes one token in every 32nd step, to learn whether that has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_DECAY = 0.8  # weight of a step's outcome after one more step
_PRIOR = 0.5  # acceptance before anything is known
_PRIOR_WEIGHT = 0.5  # in outcomes
_GAIN = 1.05
_RETRY = 32  # steps


@dataclass(frozen=True, slots=True)
class Costs:
    """In units of a step's fixed part."""

    row: float
    draft: float
    draft_row: float

    def per_token(self, rate: float, length: int, batch: int) -> float:
        """Tokens for the cost of a step when every sequence of the batch has `length` proposals."""
        said = sum(rate**number for number in range(length + 1))
        return said / (1 + self.row * batch * (1 + length) + length * (self.draft + self.draft_row * batch))


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one sequence."""

    accepted: float = 0.0  # proposals that stood, recent ones counting more
    tested: float = 0.0  # proposals whose predecessors all stood, likewise
    length: int = 0
    idle: int = _RETRY  # steps since something was proposed

    @property
    def rate(self) -> float:
        """Probability that a proposal stands."""
        return (self.accepted + _PRIOR * _PRIOR_WEIGHT) / (self.tested + _PRIOR_WEIGHT)


def next_length(record: Record, batch: int, costs: Costs, longest: int) -> Record:
    """With the length for the next step, 0 .. longest."""

    def worth(length: int) -> float:
        return costs.per_token(record.rate, length, batch)

    best = max(range(longest + 1), key=worth)
    if best < record.length or worth(best) > _GAIN * worth(record.length):
        record = replace(record, length=best)
    if not record.length and record.idle >= _RETRY:
        return replace(record, length=1, idle=0)
    return record


def learn(record: Record, proposed: int, accepted: int) -> Record:
    """After a step with `proposed` proposals, of which `accepted` stood; `proposed` 0: none could be made or wanted."""
    if not proposed:
        return replace(record, idle=record.idle + 1)
    return replace(
        record,
        accepted=_DECAY * record.accepted + accepted,
        tested=_DECAY * record.tested + min(accepted + 1, proposed),
        idle=0,
    )
