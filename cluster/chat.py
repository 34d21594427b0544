"""`baton chat`: a conversation in the terminal, or one prompt per line of stdin, with whatever model can answer."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from rich.console import Console

from ..proto.errors import BatonError
from .failures import error_text
from .output import say

Message = dict[str, str]
Pieces = Generator["str | Ended", None, None]
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How answers are drawn."""

    max_tokens: int | None  # None: until the context is full
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The counts of one answer."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, whose KV was there already
    tokens: int


class ChatModel(Protocol):
    """What can answer a conversation."""

    def answer(self, messages: Sequence[Message], wanted: Wanted) -> Pieces:
        """The text as it comes, then the counts. Closing it stops the answer. Raises BatonError."""
        ...


class Conversation:
    """The messages so far; the system's comes first when there is one."""

    def __init__(self, system: str) -> None:
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self._first)

    def ask(self, text: str) -> list[Message]:
        """The messages with a new user's turn, which becomes part of the conversation with its answer."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """A turn, whole or as far as it came."""
        self.messages = [*self.ask(text), {"role": "assistant", "content": answer}]


class _Interrupts:
    """Ctrl-C: asks an answer to stop; at the prompt, or for the second time, it is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.answering = False
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.answering or self.asked:
            raise KeyboardInterrupt
        self.asked = True


def converse(model: ChatModel, wanted: Wanted, system: str) -> int:
    """Talk until the user ends it. Exit code 1 when an answer failed and nobody was there to see it."""
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    conversation = Conversation(system)
    failed = False
    if terminal:
        notes.print("/reset forgets the conversation, Ctrl-C stops an answer, /quit or Ctrl-D ends.", style="dim")
    while (line := _read(terminal, notes)) is not None:
        text = line.strip()
        if text == "/quit":
            break
        if text == "/reset":
            conversation.reset()
            notes.print("The conversation is forgotten.", style="dim")
        elif _COMMAND.fullmatch(text):
            notes.print(f"There is no {text}; there are /reset and /quit.", style="yellow")
        elif text:
            failed = not _turn(model, conversation, text, wanted, interrupts, notes) or failed
    return 1 if failed and not terminal else 0


def _read(terminal: bool, notes: Console) -> str | None:
    """The user's next line; None at the end."""
    if not terminal:
        return sys.stdin.readline() or None
    import readline  # noqa: F401 (lets the line be edited)

    while True:
        try:
            return input("\n> ")
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            notes.print("\n/quit or Ctrl-D ends.", style="dim")


def _turn(
    model: ChatModel,
    conversation: Conversation,
    text: str,
    wanted: Wanted,
    interrupts: _Interrupts,
    notes: Console,
) -> bool:
    """One question and its answer. False when it failed; then it is no part of the conversation."""
    started = time.monotonic()
    first_s: float | None = None
    answer = ""
    ended: Ended | None = None
    interrupts.asked, interrupts.answering = False, True
    try:
        with closing(model.answer(conversation.ask(text), wanted)) as pieces:
            for piece in pieces:
                if isinstance(piece, Ended):
                    ended = piece
                else:
                    first_s = first_s or time.monotonic() - started
                    answer += piece
                    say(piece, end="")
                if interrupts.asked:
                    break
    except BatonError as error:
        notes.print(f"baton: {error_text(error)}", style="red")
        return False
    finally:
        interrupts.answering = False
    say("")
    conversation.answered(text, answer)
    notes.print(_summary(ended, time.monotonic() - started, first_s), style="dim")
    return True


def _summary(ended: Ended | None, seconds: float, first_s: float | None) -> str:
    if ended is None:
        return "[stopped]"
    rate = f", {(ended.tokens - 1) / (seconds - first_s):.1f} tokens/s" if first_s and ended.tokens > 1 else ""
    first = f", the first after {first_s:.2f} s" if first_s else ""
    return f"[{ended.tokens} tokens{first}{rate}; {ended.cached_tokens} of {ended.prompt_tokens} prompt tokens cached]"
