"""How tokens are drawn: the resolved parameters of one request, and their conversion from and to the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every value resolved; see SamplingParams in worker.proto for the neutral values."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] = field(hash=False)
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    logprobs: int | None
    grammar: str = ""
    prompt_logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether the token history changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def to_wire(self) -> pb.SamplingParams:
        """As a message."""
        return pb.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            n=self.n,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=sorted(self.stop_token_ids),
            logprobs=self.logprobs,
            grammar=self.grammar,
            prompt_logprobs=self.prompt_logprobs,
        )

    @staticmethod
    def from_wire(message: pb.SamplingParams) -> SamplingParams:
        """From a message."""
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
            n=message.n,
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            grammar=message.grammar,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        )


def finish_reason(params: SamplingParams, token_id: int, generated: int) -> str:
    """Why a choice ends with `token_id` as its output number `generated` (1-based): "stop", "length" or ""."""
    if token_id in params.stop_token_ids and generated >= params.min_tokens:
        return "stop"
    return "length" if generated >= params.max_tokens else ""
