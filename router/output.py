"""Tokens to what the client gets: text that never splits a character, cut exactly at a stop string, and counts."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import worker_pb2 as pb
from ..text.detokenizer import Detokenizer
from ..text.stopping import StopMatcher
from ..text.tokenizer import Tokenizer
from .requests import Chunk, Prepared, TokenScore, TopToken


class ChoiceText:
    """The text of one choice so far."""

    def __init__(self, tokenizer: Tokenizer, request: Prepared) -> None:
        self.count = 0
        self.reason = ""
        self.matched_stop = ""
        self._include_stop = request.include_stop
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer, request.shown_ids)
        self._matcher = StopMatcher(request.stops, request.include_stop)

    def text(self, ids: list[int]) -> str:
        """What tokens bring out which end nothing, where there are no stop strings."""
        self.count += len(ids)
        return self._detokenizer.push(ids)

    def push(self, token: pb.Token) -> tuple[str, bool]:
        """(the text that the token brings out, whether it ends the choice)."""
        self.count += 1
        hidden = token.finish_reason == "stop" and not self._include_stop
        text = "" if hidden else self._detokenizer.push([token.token_id])
        if token.finish_reason:
            text += self._detokenizer.flush()
        if self.count >= self._min_tokens:  # as for stop ids: never earlier
            text, matched = self._matcher.push(text)
            if matched is not None:
                self.reason, self.matched_stop = "stop", matched
                return text, True
        if token.finish_reason:
            self.reason = token.finish_reason
            text += self._matcher.flush()
        return text, bool(token.finish_reason)


class RequestOutput:
    """All choices of one request. `push` takes tokens in order; tokens after a choice's end are ignored."""

    def __init__(self, tokenizer: Tokenizer, request: Prepared) -> None:
        self._choices = [ChoiceText(tokenizer, request) for _ in range(request.sampling.n)]
        self._wants_scores = request.sampling.logprobs is not None
        plain = not self._wants_scores and not request.stops and request.sampling.n == 1
        self.plain = self._choices[0] if plain else None  # the only choice, where its tokens make text and nothing else

    @property
    def completion_tokens(self) -> int:
        """Tokens given out so far, over all choices."""
        return sum(choice.count for choice in self._choices)

    @property
    def longest(self) -> int:
        """Tokens given out so far, of the choice with the most."""
        return max(choice.count for choice in self._choices)

    @property
    def open_choices(self) -> int:
        """Choices that have not ended."""
        return sum(not choice.reason for choice in self._choices)

    def reason(self, choice: int) -> tuple[str, str]:
        """(finish reason or "", matched stop string)."""
        return self._choices[choice].reason, self._choices[choice].matched_stop

    def push(self, tokens: Sequence[pb.Token]) -> tuple[list[Chunk], list[int]]:
        """(what to send, the choices that ended now)."""
        chunks: list[Chunk] = []
        ended: list[int] = []
        for token in tokens:
            choice = self._choices[token.choice]
            if choice.reason:
                continue
            text, over = choice.push(token)
            scores = [_score(token)] if self._wants_scores else []
            chunk = Chunk(token.choice, token.index, [token.token_id], text, scores)
            if not (chunks and merge(chunks[-1], chunk)):
                chunks.append(chunk)
            if over:
                ended.append(token.choice)
        return chunks, ended


def merge(into: Chunk, chunk: Chunk) -> bool:
    """Appends `chunk` to `into` when it continues the same choice; False when it does not."""
    if into.choice != chunk.choice or into.offset + len(into.token_ids) != chunk.offset:
        return False
    into.token_ids += chunk.token_ids
    into.text += chunk.text
    into.scores += chunk.scores
    return True


def _score(token: pb.Token) -> TokenScore:
    return TokenScore(token.logprob, tuple(TopToken(top.token_id, top.logprob) for top in token.top_logprobs))
