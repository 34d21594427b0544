"""Answers in OpenAI's shapes: whole objects and the events of a stream, for completions and for chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..proto.errors import BatonError
from ..text.tokenizer import Tokenizer
from .requests import ChoiceEnd, Output, TokenScore, Usage

Json = dict[str, Any]
_ERROR_TYPES = dict.fromkeys((400, 405, 413), "invalid_request_error")
_ERROR_TYPES |= {404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}


def error_body(error: BatonError) -> Json:
    """The body of an error."""
    kind = _ERROR_TYPES.get(error.http_status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": error.code}}


def usage_body(usages: Iterable[Usage]) -> Json:
    """The sum over the prompts of one call."""
    known = list(usages)
    prompt = sum(usage.prompt_tokens for usage in known)
    completion = sum(usage.completion_tokens for usage in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
    }


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """How a token is shown: its text, or its bytes where they are no whole characters."""
    spelling = tokenizer.token_bytes(token_id)
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class Format(Protocol):
    """What differs between the two endpoints."""

    id_prefix: str
    object_name: str
    chunk_name: str
    opening: Json | None  # content of a choice's first event

    def whole(self, text: str) -> Json: ...

    def delta(self, text: str) -> Json: ...

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore], offset: int) -> Json: ...


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    opening: Json | None = None

    def whole(self, text: str) -> Json:
        """Content of a whole choice."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """Content of an event."""
        return {"text": text}

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore], offset: int) -> Json:
        """Parallel lists; `offset` is the text offset of the first token."""
        tokens = [token_text(tokenizer, i) for i in ids]
        top = []
        for token, score in zip(tokens, scores, strict=True):
            best = {token_text(tokenizer, t.token_id): t.logprob for t in score.top}
            top.append({**best, token: score.logprob})
        starts = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        values = [score.logprob for score in scores]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": starts}


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self) -> None:
        self.opening: Json | None = {"delta": {"role": "assistant", "content": ""}}

    def whole(self, text: str) -> Json:
        """Content of a whole choice."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        """Content of an event; empty in the one that ends the choice."""
        return {"delta": {"content": text} if text else {}}

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore], offset: int) -> Json:
        """One entry per token."""

        def entry(token_id: int, logprob: float) -> Json:
            spelling = list(tokenizer.token_bytes(token_id))
            return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": spelling}

        content = []
        for token_id, score in zip(ids, scores, strict=True):
            top = [entry(alternative.token_id, alternative.logprob) for alternative in score.top]
            content.append({**entry(token_id, score.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


@dataclass(slots=True)
class _Choice:
    """What one choice has said; in streams only `shown` is kept up."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    end: ChoiceEnd | None = None
    shown: int = 0  # characters of its tokens so far


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked to see."""

    n: int  # choices per prompt
    token_ids: bool
    logprobs: bool
    usage: bool  # in the stream


class AnswerBuilder:
    """Puts one answer together. Choice c of prompt p has the index p x n + c."""

    def __init__(self, form: Format, answer_id: str, created: int, model: str, tokenizer: Tokenizer, wanted: Wanted):
        self._form = form
        self._head = {"id": form.id_prefix + answer_id, "created": created, "model": model}
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._choices: dict[int, _Choice] = {}
        self._usages: list[Usage] = []

    # ---- whole answers ---------------------------------------------------------------------------------------------

    def add(self, prompt: int, output: Output) -> None:
        """Takes in a part of the answer."""
        choice = self._choices.setdefault(prompt * self._wanted.n + output.choice, _Choice())
        if isinstance(output, ChoiceEnd):
            self._ended(choice, output)
        else:
            choice.text += output.text
            choice.token_ids += output.token_ids
            choice.scores += output.scores

    def whole(self) -> Json:
        """The answer after its last part."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            body = {"index": index, **self._form.whole(choice.text)}
            body["logprobs"] = self._scores(choice, choice.token_ids, choice.scores)
            choices.append(body | _ending(choice.end) | self._ids(choice.token_ids))
        return {**self._head, "object": self._form.object_name, "choices": choices, "usage": self._usage()}

    # ---- streams ---------------------------------------------------------------------------------------------------

    def events(self, prompt: int, output: Output) -> list[Json]:
        """The events for one part of the answer; none while its text is held back and nothing else was asked for."""
        index = prompt * self._wanted.n + output.choice
        events: list[Json] = []
        if index not in self._choices:
            self._choices[index] = _Choice()
            if self._form.opening is not None:
                events.append(self._event(index, self._form.opening))
        choice = self._choices[index]
        if isinstance(output, ChoiceEnd):
            self._ended(choice, output)
            events.append(self._event(index, self._form.delta(""), _ending(output)))
        elif output.text or self._wanted.token_ids or output.scores:
            scores = self._scores(choice, output.token_ids, output.scores)
            content = self._form.delta(output.text)
            events.append(self._event(index, content, {"logprobs": scores} | self._ids(output.token_ids)))
        return events

    def usage_event(self) -> Json | None:
        """The event after the last choice, when the client asked for it."""
        if not self._wanted.usage:
            return None
        return {**self._head, "object": self._form.chunk_name, "choices": [], "usage": self._usage()}

    def _event(self, index: int, content: Json, more: Json | None = None) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **(more or {})}
        usage = {"usage": None} if self._wanted.usage else {}
        return {**self._head, "object": self._form.chunk_name, "choices": [choice], **usage}

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _ended(self, choice: _Choice, end: ChoiceEnd) -> None:
        choice.end = end
        if end.usage is not None:
            self._usages.append(end.usage)

    def _usage(self) -> Json:
        return usage_body(self._usages)

    def _ids(self, ids: Sequence[int]) -> Json:
        return {"token_ids": list(ids)} if self._wanted.token_ids else {}

    def _scores(self, choice: _Choice, ids: Sequence[int], scores: Sequence[TokenScore]) -> Json | None:
        if not self._wanted.logprobs:
            return None
        offset = choice.shown
        choice.shown += sum(len(token_text(self._tokenizer, i)) for i in ids)
        return self._form.scores(self._tokenizer, ids, scores, offset)


def _ending(end: ChoiceEnd | None) -> Json:
    """finish_reason is never invented: it is null for a choice that did not end."""
    return {"finish_reason": end.reason if end else None, "stop_reason": (end.matched_stop or None) if end else None}
