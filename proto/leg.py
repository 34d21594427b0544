"""A leg as the workers see it: parsed from the wire and checked once, before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass

from . import worker_pb2 as pb
from .errors import InvalidRequest
from .sampling import SamplingParams

LegKey = tuple[str, int, int]  # request id, attempt, first choice


@dataclass(frozen=True, slots=True)
class Leg:
    """One pass of a request through the workers; see Leg in worker.proto."""

    key: LegKey
    choices: tuple[int, ...]
    prompt: list[int]
    generated: list[int]  # output of the only choice before this leg
    tokens: list[int]  # both, end to end: what must be in the pool before the next token is drawn
    sampling: SamplingParams
    deadline: float  # by this process's monotonic clock
    salt: str

    @property
    def length(self) -> int:
        """How many tokens are in `tokens`."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that each choice may still get, the prefill worker's one included."""
        return self.sampling.max_tokens - len(self.generated)

    @property
    def last(self) -> int:
        """Tokens of KV that a choice has at most: the last token drawn is never fed back."""
        return self.length + self.remaining - 1


def key_of(ref: pb.LegRef | pb.Leg) -> LegKey:
    """The key of a reference, or of a leg (whose first choice names it)."""
    if isinstance(ref, pb.LegRef):
        return ref.request_id, ref.attempt, ref.first_choice
    return ref.request_id, ref.attempt, ref.choices[0] if ref.choices else 0


def ref_of(key: LegKey) -> pb.LegRef:
    """The inverse of `key_of`."""
    return pb.LegRef(request_id=key[0], attempt=key[1], first_choice=key[2])


def parse_leg(message: pb.Leg, vocab_size: int, max_model_len: int, now: float) -> Leg:
    """Check and convert; `now` is monotonic. Raises InvalidRequest, naming the request's field."""
    prompt, generated = list(message.prompt_token_ids), list(message.generated_token_ids)
    leg = Leg(
        key=key_of(message),
        choices=tuple(message.choices),
        prompt=prompt,
        generated=generated,
        tokens=prompt + generated,
        sampling=SamplingParams.from_wire(message.sampling),
        deadline=now + message.deadline_s,
        salt=message.cache_salt,
    )
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", field="token_ids")
    if generated and (min(generated) < 0 or max(generated) >= vocab_size):
        raise InvalidRequest(f"generated token ids are outside the vocabulary of {vocab_size}", field="token_ids")
    if not leg.choices or len(set(leg.choices)) < len(leg.choices):
        raise InvalidRequest(f"a leg needs distinct choices, not {list(leg.choices)}", field="n")
    if generated and len(leg.choices) > 1:
        raise InvalidRequest("a leg that resumes serves one choice", field="n")
    if leg.remaining < 1:
        raise InvalidRequest(f"max_tokens {leg.sampling.max_tokens} leaves nothing to generate", field="max_tokens")
    if leg.length > max_model_len:
        raise InvalidRequest(f"{leg.length} tokens exceed the context of {max_model_len}", field="prompt")
    return leg
