"""Between the messages of vllm.grpc.engine and the protocol-neutral form of requests and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from ..proto.errors import InvalidRequest
from ..router.constraint import Constraint
from ..router.requests import ChoiceEnd, Chunk, ClientRequest, TokenScore

_REFUSED = ("mm_inputs", "media_refs", "kv_transfer_params")  # what they ask for is not done here
_SEEDS = 1 << 64


def client_request(request: vllm.GenerateRequest, left_s: float | None, *, prefill_only: bool) -> ClientRequest:
    """A Generate call. prefill_only: one token, whatever lengths and choices it asks for. Raises InvalidRequest.

    Plain fields of proto3 cannot be told from absent ones: their zero stands for the neutral value.
    """
    _refuse(request)
    asked = request.sampling_params
    ids = list(request.tokenized.input_ids) if request.WhichOneof("input") == "tokenized" else None
    if ids is not None and asked.HasField("truncate_prompt_tokens") and asked.truncate_prompt_tokens > 0:
        ids = ids[-asked.truncate_prompt_tokens :]
    return ClientRequest(
        prompt=request.text if request.WhichOneof("input") == "text" else None,
        token_ids=ids,
        input_field="text" if ids is None else "tokenized",
        label=request.request_id,
        temperature=asked.temperature if asked.HasField("temperature") else None,
        top_k=min(asked.top_k, (1 << 31) - 1) or None,
        top_p=asked.top_p or None,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty or None,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=dict(asked.logit_bias),
        seed=asked.seed % _SEEDS if asked.HasField("seed") else None,
        n=1 if prefill_only else asked.n or None,
        max_tokens=1 if prefill_only else asked.max_tokens if asked.HasField("max_tokens") else None,
        min_tokens=0 if prefill_only else asked.min_tokens,
        stop=list(asked.stop),
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        include_stop=asked.include_stop_str_in_output,
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") and not prefill_only else None,
        constraint=None if prefill_only else _constraint(asked),
        deadline_s=left_s,
    )


def _constraint(asked: vllm.SamplingParams) -> Constraint | None:
    name = asked.WhichOneof("constraint")
    field = f"sampling_params.{name}"
    match name:
        case "json_schema":
            return Constraint("json", asked.json_schema, field)
        case "json_object":
            return Constraint("json", {"type": "object"}, field) if asked.json_object else None
        case "regex":
            return Constraint("regex", asked.regex, field)
        case "grammar":
            return Constraint("grammar", asked.grammar, field)
        case "choice":
            return Constraint("choice", list(asked.choice.choices), field)
        case _:
            return None


def _refuse(request: vllm.GenerateRequest) -> None:
    """Raises InvalidRequest for what would be ignored otherwise."""
    asked = request.sampling_params
    refused = [name for name in _REFUSED if request.HasField(name)]
    refused += ["extra_mm_inputs"] * bool(request.extra_mm_inputs)
    refused += ["data_parallel_rank"] * (request.data_parallel_rank > 0)
    refused += ["sampling_params.structural_tag"] * asked.HasField("structural_tag")
    if refused:
        raise InvalidRequest(f"{refused[0]}: not supported by this worker", field=refused[0])


@dataclass
class _Choice:
    ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    over: bool = False


class Answers:
    """The messages of one answer. stream: tokens as they come, else each choice whole."""

    def __init__(self, request: vllm.GenerateRequest, prompt_tokens: int, n: int, ticket: str) -> None:
        self._stream = request.stream
        self._stop_ids = frozenset(request.sampling_params.stop_token_ids)
        self._prompt_tokens = prompt_tokens
        self._choices = [_Choice() for _ in range(n)]
        self._ticket = ticket
        self._input: vllm.InputLogProbs | None = None

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenScore | None]) -> None:
        """The prompt's logprobs; they go into the first message, or into the whole answers."""
        self._input = vllm.InputLogProbs(
            token_logprobs=[vllm.InputTokenLogProb(value=score.logprob if score else None) for score in scores],
            token_ids=ids,
            top_logprobs=[_top(score) if score else vllm.TopLogProbs() for score in scores],
        )

    def chunk(self, chunk: Chunk) -> vllm.GenerateResponse | None:
        """Tokens of one choice."""
        choice = self._choices[chunk.choice]
        choice.ids += chunk.token_ids
        choice.scores += chunk.scores
        if not self._stream:
            return None
        first, self._input = self._input, None
        return vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                input_logprobs=first,
                token_ids=chunk.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(choice.ids),
                output_logprobs=_logprobs(chunk.token_ids, chunk.scores),
                index=chunk.choice,
            )
        )

    def end(self, end: ChoiceEnd) -> vllm.GenerateResponse:
        """A choice is over."""
        complete = self._complete(end.choice, end.reason)
        ids = self._choices[end.choice].ids
        if end.usage is not None:
            complete.cached_tokens = end.usage.cached_tokens
        if end.matched_stop:
            complete.matched_stop_str = end.matched_stop
        elif end.reason == "stop" and ids and ids[-1] in self._stop_ids:
            complete.matched_token_id = ids[-1]
        if self._ticket:
            complete.kv_transfer_params_json = self._ticket
        return vllm.GenerateResponse(complete=complete)

    def aborted(self) -> list[vllm.GenerateResponse]:
        """The choices that an Abort ended."""
        left = [index for index, choice in enumerate(self._choices) if not choice.over]
        return [vllm.GenerateResponse(complete=self._complete(index, "abort")) for index in left]

    def _complete(self, index: int, reason: str) -> vllm.GenerateComplete:
        choice = self._choices[index]
        choice.over = True
        return vllm.GenerateComplete(
            output_ids=choice.ids,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.ids),
            output_logprobs=_logprobs(choice.ids, choice.scores),
            input_logprobs=self._input,
            index=index,
        )


def _logprobs(ids: Sequence[int], scores: Sequence[TokenScore]) -> vllm.OutputLogProbs | None:
    if not scores:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[score.logprob for score in scores],
        token_ids=ids,
        top_logprobs=[_top(score) for score in scores],
    )


def _top(score: TokenScore) -> Any:
    return vllm.TopLogProbs(values=[top.logprob for top in score.top], token_ids=[top.token_id for top in score.top])
