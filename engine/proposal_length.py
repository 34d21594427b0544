"""How many tokens to propose for a sequence: a pure function of its recent acceptance and of the size of the batch.

**The law.** A step of a batch of B sequences costs a fixed part (the weights are read once), taken as 1, and `row` for
each row. With k proposals for each sequence it has B (1 + k) rows, and the proposing itself costs `draft` and B times
`draft_row` for each of the k. If a proposal stands with probability p when all before it do, a step says

    E(p, k) = 1 + p + ... + p^k tokens          (Leviathan et al., 2023, equation 1)

for each sequence. The k with the most tokens for its cost wins: as the batch grows the rows outweigh the fixed part,
and k falls to 0 by itself.

**Reading.** A draft model reads a sequence before it says anything of it, which costs `draft_row` for each token and
`draft` for each step that it reads in. Until it has read all, proposals must gain that back over what the sequence has
still to say: as much as it has said so far, at least 64 tokens and at most what the request allows.

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
_AHEAD = 64  # tokens that a sequence is thought to say yet, at least
READ_AT_ONCE = 256  # tokens of a step in which a draft model reads what is new to it: all others wait meanwhile


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

    def reading(self, tokens: int) -> float:
        """Of a draft model that reads so many tokens of one sequence."""
        return self.draft_row * tokens + self.draft * -(-tokens // READ_AT_ONCE)


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


def reading_pays(record: Record, batch: int, costs: Costs, unread: int, said: int, left: int) -> bool:
    """Whether `record.length` proposals a step gain what a draft model's reading of `unread` tokens a sequence costs.

    `said`, `left`: tokens of this one that were drawn, and those that still may be.
    """
    ahead = min(left, max(said, _AHEAD))
    gained = 1 / costs.per_token(record.rate, 0, batch) - 1 / costs.per_token(record.rate, record.length, batch)
    return ahead * gained > batch * costs.reading(unread)


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
