"""Token ids to text as they come: a character is given out only when all its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice. What `push` and `flush` return, joined, is `tokenizer.decode(ids, skip_special=True)`
    of all ids, however they were split over the calls; special tokens in `shown` are text too."""

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if shown else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # a character, whose other bytes are to come
        self._as_usual = not shown

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete; special tokens have no text."""
        if self._as_usual and not self._inside:
            texts = list(map(self._tokenizer.whole_texts.__getitem__, ids))
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        hidden = self._hidden
        text = self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in hidden))
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The end of the text: U+FFFD where it ends inside a character."""
        return self._decoder.decode(b"", final=True)
