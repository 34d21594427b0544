"""The short way of a stream's tokens to its client: events of which only the text, and ids, are made anew."""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring

from .openai_answer import AnswerBuilder
from .openai_shapes import encode, event
from .requests import Chunk

_MARK = "\0"  # in the sample of an event, where others differ; how JSON spells it occurs nowhere behind the text


class TextEvents:
    """Of the only prompt of an answer. write: sends a part; False: it has not, and others must."""

    def __init__(self, builder: AnswerBuilder, write: Callable[[bytes], bool]) -> None:
        self._builder = builder
        self._write = write
        self._fixed: dict[int, list[str]] = {}  # by choice: what is before, between and behind text and ids

    def take(self, chunk: Chunk) -> bool:
        """Sends the event for a chunk; False: nothing was sent, because there may be more to it than its text."""
        fixed = self._fixed.get(chunk.choice) or self._learn(chunk.choice)
        if not fixed or not chunk.text:
            return False
        text = encode_basestring(chunk.text)
        if len(fixed) == 2:
            made = f"{fixed[0]}{text}{fixed[1]}"
        else:
            ids = str(chunk.token_ids).replace(" ", "")
            made = f"{fixed[0]}{text}{fixed[1]}{ids}{fixed[2]}"
        return self._write(made.encode())

    def _learn(self, choice: int) -> list[str]:
        sample = self._builder.sample(choice, _MARK)
        if sample is None:
            return []
        body, marks = event(sample).decode(), 2 if self._builder.shows_ids else 1
        self._fixed[choice] = body.rsplit(encode(_MARK), marks)
        return self._fixed[choice]
