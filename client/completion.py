"""A whole answer, put together from the messages of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..proto import baton_pb2 as api


@dataclass
class Choice:
    """One answer, whole."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[api.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str = ""


@dataclass
class Completion:
    """One request, whole. Times are of this process's monotonic clock."""

    started_s: float
    choices: list[Choice]
    request_id: str = ""
    prompt_tokens: int = 0
    usage: api.Usage | None = None
    timing: api.Timing | None = None
    prompt_logprobs: list[api.TokenLogprobs] = field(default_factory=list)  # of its tokens but the first
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens) of each message that had tokens
    ended_s: float = 0.0

    def take(self, event: api.GenerateResponse, now: float) -> None:
        """Add one message of the stream."""
        kind = event.WhichOneof("event")
        self.ended_s = now
        if kind == "accepted":
            self.request_id, self.prompt_tokens = event.accepted.request_id, event.accepted.prompt_tokens
        elif kind == "prompt":
            self.prompt_logprobs = list(event.prompt.logprobs)
        elif kind == "tokens":
            choice = self._choice(event.tokens.choice)
            choice.token_ids += event.tokens.token_ids
            choice.text += event.tokens.text
            choice.logprobs += event.tokens.logprobs
            if event.tokens.token_ids:
                self.arrivals.append((now, len(event.tokens.token_ids)))
        elif kind == "finished":
            choice = self._choice(event.finished.choice)
            choice.finish_reason, choice.matched_stop = event.finished.reason, event.finished.matched_stop
            if event.finished.HasField("usage"):
                self.usage = event.finished.usage
            if event.finished.HasField("timing"):
                self.timing = event.finished.timing

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]
