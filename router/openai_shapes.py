"""The shapes of OpenAI's answers: what differs between completions and chats, errors, counts and scores. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..proto.errors import BatonError
from ..text.tokenizer import Tokenizer
from .requests import TokenScore, Usage

Json = dict[str, Any]
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
Scores = Sequence[TokenScore | None]
_ERROR_TYPES = dict.fromkeys((400, 405, 413), "invalid_request_error")
_ERROR_TYPES |= {404: "not_found_error", 401: "authentication_error", 429: "rate_limit_error", 499: "cancelled"}


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
    return b"data: " + encode(body).encode() + b"\n\n"


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

    def whole(self, text: str, calls: Sequence[Json]) -> Json: ...

    def delta(self, text: str) -> Json: ...

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Scores, offset: int) -> tuple[Json, int]: ...


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    opening: Json | None = None

    def whole(self, text: str, calls: Sequence[Json]) -> Json:
        """Content of a whole choice."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """Content of an event."""
        return {"text": text}

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Scores, offset: int) -> tuple[Json, int]:
        """Parallel lists, and the text offset behind them; `offset`: that of the first token. A prompt's first token
        has no score."""
        tokens = [token_text(tokenizer, i) for i in ids]
        top: list[Json | None] = []
        starts = []
        for token, score in zip(tokens, scores, strict=True):
            best = {token_text(tokenizer, t.token_id): t.logprob for t in score.top} if score else {}
            top.append({**best, token: score.logprob} if score else None)
            starts.append(offset)
            offset += len(token)
        values = [score.logprob if score else None for score in scores]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": starts}, offset


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self) -> None:
        self.opening: Json | None = {"delta": {"role": "assistant", "content": ""}}

    def whole(self, text: str, calls: Sequence[Json]) -> Json:
        """Content of a whole choice."""
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        return {"message": message | ({"tool_calls": list(calls)} if calls else {})}

    def delta(self, text: str) -> Json:
        """Content of an event; empty in the one that ends the choice."""
        return {"delta": {"content": text} if text else {}}

    def scores(self, tokenizer: Tokenizer, ids: Sequence[int], scores: Scores, offset: int) -> tuple[Json, int]:
        """One entry per token."""

        def entry(token_id: int, logprob: float) -> Json:
            spelling = list(tokenizer.token_bytes(token_id))
            return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": spelling}

        content = []
        for token_id, score in zip(ids, scores, strict=True):
            top = [entry(alternative.token_id, alternative.logprob) for alternative in score.top] if score else []
            content.append({**entry(token_id, score.logprob if score else 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}, offset


def prompt_scores(tokenizer: Tokenizer, ids: Sequence[int], scores: Scores) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: by token id, for each token of the prompt; null for the first."""

    def shown(token_id: int, logprob: float) -> Json:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    entries: list[Json | None] = []
    for token_id, score in zip(ids, scores, strict=True):
        if score is None:
            entries.append(None)
            continue
        best = {str(one.token_id): shown(one.token_id, one.logprob) for one in score.top}
        entries.append({**best, str(token_id): shown(token_id, score.logprob)})
    return entries
