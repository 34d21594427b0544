"""Between the messages of baton.v1 and the protocol-neutral form of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..proto import baton_pb2 as api
from ..proto.errors import InvalidRequest
from .constraint import Constraint
from .live import Answer
from .requests import ChoiceEnd, ClientRequest, Output, Timing, TokenScore, Usage


def client_request(request: api.GenerateRequest, metadata: Mapping[str, str], left_s: float | None) -> ClientRequest:
    """The protocol-neutral form of a Generate call; left_s: until the call's own deadline."""
    kind = request.WhichOneof("input")

    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    return ClientRequest(
        prompt=request.prompt if kind == "prompt" else None,
        token_ids=list(request.token_ids.ids) if kind == "token_ids" else None,
        messages=messages_of(request.messages.messages) if kind == "messages" else None,
        input_field=kind or "prompt",
        label=request.request_id or metadata.get("x-request-id", ""),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=dict(request.logit_bias),
        seed=given("seed"),
        n=given("n"),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens"),
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
        logprobs=given("logprobs"),
        cache_salt=request.cache_salt,
        session=request.session_id,
        priority=given("priority"),
        stream_interval=given("stream_interval"),
        prompt_logprobs=given("prompt_logprobs"),
        constraint=_constraint(request),
        deadline_s=left_s,
    )


def chat_request(request: api.ChatRequest, metadata: Mapping[str, str], left_s: float | None) -> ClientRequest:
    """That of a Chat call. Raises InvalidRequest when its parameters have an input of their own."""
    if request.parameters.WhichOneof("input") is not None:
        raise InvalidRequest("parameters: of a chat they have no prompt, token_ids or messages", field="parameters")
    asked = client_request(request.parameters, metadata, left_s)
    return replace(asked, messages=messages_of(request.messages), input_field="messages")


def _constraint(request: api.GenerateRequest) -> Constraint | None:
    field = request.WhichOneof("constraint")
    match field:
        case None:
            return None
        case "json_object":
            return Constraint("json", {"type": "object"}, field) if request.json_object else None
        case "one_of":
            return Constraint("choice", list(request.one_of.texts), field)
        case "json_schema":
            return Constraint("json", request.json_schema, field)
        case "regex":
            return Constraint("regex", request.regex, field)
        case _:
            return Constraint("grammar", request.grammar, field)


def messages_of(messages: Sequence[api.Message]) -> list[dict[str, str]]:
    """As the chat template takes them."""
    return [{"role": message.role, "content": message.content} for message in messages]


async def tell(answer: Answer, say: Callable[[api.GenerateResponse], Awaitable[None]]) -> None:
    """Says the messages of one answer, one after the other. Raises the BatonError that ended it."""
    accepted = api.Accepted(request_id=answer.request_id, prompt_tokens=answer.prompt_tokens)
    await say(api.GenerateResponse(accepted=accepted))
    scored = answer.scored
    async for outputs in answer.outputs():
        if scored:
            scored = False
            await say(_prompt(await answer.prompt_scores()))
        for output in outputs:
            await say(response(output))


def _prompt(scores: Sequence[TokenScore | None]) -> api.GenerateResponse:
    said = [_score(score) for score in scores if score is not None]
    return api.GenerateResponse(prompt=api.PromptLogprobs(logprobs=said))


def response(output: Output) -> api.GenerateResponse:
    """One message of the stream."""
    if isinstance(output, ChoiceEnd):
        return api.GenerateResponse(finished=_finished(output))
    message = api.GenerateResponse()
    tokens = message.tokens  # filled in place: a message given to another's constructor is copied, for four times this
    tokens.choice, tokens.offset, tokens.text = output.choice, output.offset, output.text
    tokens.token_ids.extend(output.token_ids)
    if output.scores:
        tokens.logprobs.extend(map(_score, output.scores))
    return message


def _score(score: TokenScore) -> api.TokenLogprobs:
    top = [api.TopLogprob(token_id=one.token_id, logprob=one.logprob) for one in score.top]
    return api.TokenLogprobs(logprob=score.logprob, top=top)


def _finished(end: ChoiceEnd) -> api.Finished:
    return api.Finished(
        choice=end.choice,
        reason=end.reason,
        usage=_usage(end.usage) if end.usage else None,
        timing=_timing(end.timing) if end.timing else None,
        matched_stop=end.matched_stop,
    )


def _usage(usage: Usage) -> api.Usage:
    return api.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _timing(timing: Timing) -> api.Timing:
    return api.Timing(**{name: getattr(timing, name) for name in Timing.__slots__})
