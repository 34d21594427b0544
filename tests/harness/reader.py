"""A stream that is read in a thread while a test breaks things, and how it ended."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import grpc
from baton.tests.harness.client import Answer, Stream
from baton.tests.harness.rig import Rig

DEADLINE_S = 30.0
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
_starts = itertools.count(1)


@dataclass
class Outcome:
    """How the victim's request ended: a whole answer, or one error."""

    answer: Answer | None
    code: grpc.StatusCode | None
    took_s: float


def ids(length: int) -> list[int]:
    """A prompt of byte tokens that shares no block with any other."""
    return list(random.Random(next(_starts)).randbytes(length))


class Reader:
    """A stream that is read in a thread."""

    def __init__(self, rig: Rig, prompt: list[int], count: int, deadline_s: float = DEADLINE_S) -> None:
        self.prompt = prompt
        self._began = time.monotonic()
        self._stream: Stream = rig.client.stream(deadline_s, token_ids=prompt, max_tokens=count, **_GREEDY)
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._read, name="stream")
        self._thread.start()

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._stream.answer

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """The client leaves."""
        self._stream.cancel()

    def wait_tokens(self, count: int) -> None:
        """Returns when so many tokens have come."""
        deadline = time.monotonic() + 40
        while len(self._stream.answer.token_ids) < count:
            assert time.monotonic() < deadline, "no tokens"
            time.sleep(0.005)

    def end(self, limit_s: float) -> Outcome:
        """How it ended."""
        self._thread.join(limit_s)
        assert self._outcome is not None, "the request hangs"
        return self._outcome

    def _read(self) -> None:
        try:
            answer: Answer | None = self._stream.rest()
            code = None
        except grpc.RpcError as error:
            answer, code = None, error.code()
        self._outcome = Outcome(answer, code, time.monotonic() - self._began)
