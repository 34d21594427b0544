"""Text to ids off the event loop: a few threads and a bounded queue, so that a huge prompt delays nobody's stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..proto.errors import Exhausted
from ..text.chat_template import ChatTemplate
from ..text.grammar import Vocabulary
from ..text.source import resolve
from ..text.tokenizer import Tokenizer
from ..text.tool_calls import ToolStyle
from .constraint import Constraint, compiled

T = TypeVar("T")

_THREADS = 2
_RETRY_AFTER_S = 1.0


class TextService:
    """The model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_waiting: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._max_waiting = max_waiting
        self._waiting = 0
        self._lock = threading.Lock()
        self._known: Vocabulary | None = None  # made for the first constraint
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    @staticmethod
    def load(model_path: str, max_waiting: int) -> TextService:
        """Reads the tokenizer of the model. Raises ConfigError; blocks."""
        tokenizer = Tokenizer.load(resolve(model_path))
        return TextService(tokenizer, ChatTemplate(tokenizer), max_waiting)

    async def encode(self, prompt: str, bos: bool | None = None) -> list[int]:
        """Ids of a raw prompt: special tokens parsed, BOS where `bos` or the tokenizer says so. Raises Exhausted."""
        return await self._in_thread(lambda: self.tokenizer.encode(prompt, special=True, bos=bos))

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a chat through the model's template. Raises InvalidRequest, Exhausted."""
        return await self._in_thread(lambda: self._template.render_ids(messages, tools))

    @property
    def tool_style(self) -> ToolStyle | None:
        """How the model's template asks for calls of tools; None: it does not."""
        return self._template.tool_style

    @property
    def tool_marks(self) -> frozenset[int]:
        """Special tokens that say where calls of tools begin."""
        mark = self.tool_style.mark if self.tool_style is not None else ""
        return frozenset(special.token_id for special in self.tokenizer.specials if special.text == mark)

    async def compile(self, wanted: Constraint, most_bytes: int) -> str:
        """The grammar of a constraint. Raises InvalidRequest, Exhausted."""
        return await self._in_thread(lambda: compiled(wanted, self._vocabulary(), self.tool_style, most_bytes))

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._known is None:
                self._known = Vocabulary(self.tokenizer)
            return self._known

    async def work(self, make: Callable[[], T]) -> T:
        """What `make` returns, made beside the event loop. Raises Exhausted."""
        return await self._in_thread(make)

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids. Raises Exhausted."""
        return await self._in_thread(lambda: self.tokenizer.decode(ids, skip_special))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._max_waiting:
            raise Exhausted("too many texts wait for the tokenizer", retry_after_s=_RETRY_AFTER_S)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the threads; what waits in the queue is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
