"""A blocking gRPC client for tests that also checks the stream's own rules: accepted first, every output index once and
in order, one end per choice, the usage on the last one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from baton.proto import baton_pb2 as pb
from baton.proto import baton_pb2_grpc


@dataclass
class Choice:
    """What one choice has said so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    reason: str = ""
    matched_stop: str = ""


@dataclass
class Answer:
    """A whole answer. `arrivals`: monotonic time of each message."""

    choices: list[Choice]
    request_id: str = ""
    prompt_tokens: int = 0
    usage: pb.Usage = field(default_factory=pb.Usage)
    timing: pb.Timing = field(default_factory=pb.Timing)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.token_ids

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.text

    @property
    def reason(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.reason

    def take(self, message: pb.GenerateResponse) -> None:
        """Adds one message; AssertionError when it breaks the stream's rules."""
        self.arrivals.append(time.monotonic())
        kind = message.WhichOneof("event")
        if kind == "accepted":
            assert not self.request_id, "accepted twice"
            self.request_id, self.prompt_tokens = message.accepted.request_id, message.accepted.prompt_tokens
            return
        assert self.request_id, f"{kind} before accepted"
        if kind == "prompt":
            assert not self.prompt_logprobs, "the prompt's logprobs twice"
            assert not any(choice.token_ids for choice in self.choices), "the prompt after its answer"
            self.prompt_logprobs = list(message.prompt.logprobs)
            return
        if kind == "tokens":
            chunk = message.tokens
            choice = self.choices[chunk.choice]
            assert not choice.reason, f"tokens after the end of choice {chunk.choice}"
            assert chunk.offset == len(choice.token_ids), "a gap or a duplicate"
            choice.token_ids += chunk.token_ids
            choice.text += chunk.text
            choice.logprobs += chunk.logprobs
            return
        assert kind == "finished", f"unknown event {kind}"
        end = message.finished
        choice = self.choices[end.choice]
        assert not choice.reason, f"choice {end.choice} ended twice"
        choice.reason, choice.matched_stop = end.reason, end.matched_stop
        if end.HasField("usage"):
            assert all(other.reason for other in self.choices), "usage before the last end"
            self.usage, self.timing = end.usage, end.timing

    def check_whole(self) -> None:
        """AssertionError unless every choice has ended and the counts agree."""
        assert all(choice.reason in ("stop", "length") for choice in self.choices), self.choices
        assert self.usage.completion_tokens == sum(len(choice.token_ids) for choice in self.choices)
        assert self.usage.prompt_tokens == self.prompt_tokens


class Stream:
    """One answer that is still coming. Iterate to advance; `answer` holds what has come."""

    def __init__(self, call: Any, choices: int) -> None:
        self._call = call
        self.answer = Answer([Choice() for _ in range(choices)])

    def __iter__(self) -> Iterator[Answer]:
        for message in self._call:
            self.answer.take(message)
            yield self.answer

    def until_tokens(self, count: int) -> Answer:
        """Reads on until choice 0 has at least `count` tokens."""
        for answer in self:
            if len(answer.choices[0].token_ids) >= count:
                break
        return self.answer

    def rest(self) -> Answer:
        """Reads to the end and checks that the answer is whole. Raises grpc.RpcError."""
        for _ in self:
            pass
        self.answer.check_whole()
        return self.answer

    def cancel(self) -> None:
        """Leaves the stream."""
        self._call.cancel()


class Client:
    """Speaks baton.v1 to one router, on a connection of its own."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = baton_pb2_grpc.BatonStub(self._channel)

    def close(self) -> None:
        """Ends the connection and with it every stream."""
        self._channel.close()

    def stream(self, timeout_s: float = 60.0, **fields: Any) -> Stream:
        """Begins a request; `fields` are those of GenerateRequest, `token_ids` a list, `messages` a list of dicts."""
        request = request_of(**fields)
        return Stream(self._stub.Generate(request, timeout=timeout_s), request.n or 1)

    def generate(self, timeout_s: float = 60.0, **fields: Any) -> Answer:
        """One whole answer. Raises grpc.RpcError."""
        return self.stream(timeout_s, **fields).rest()

    def refused(self, timeout_s: float = 60.0, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """Status and message of a request that must fail. AssertionError when it does not, or gives out tokens."""
        stream = self.stream(timeout_s, **fields)
        with expect_status() as status:
            stream.rest()
        assert not any(choice.token_ids for choice in stream.answer.choices), "tokens before the refusal"
        return status[0]

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """Text without special tokens."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special=True)
        return str(self._stub.Detokenize(request, timeout=30).text)

    def models(self) -> list[pb.Model]:
        """What ListModels says."""
        return list(self._stub.ListModels(pb.ListModelsRequest(), timeout=30).models)


@contextmanager
def expect_status() -> Iterator[list[tuple[grpc.StatusCode, str]]]:
    """Its block must raise RpcError; the list then holds the status and its message."""
    found: list[tuple[grpc.StatusCode, str]] = []
    try:
        yield found
    except grpc.RpcError as error:
        found.append((error.code(), error.details() or ""))
    assert found, "the request was served"


def request_of(
    token_ids: Sequence[int] | None = None, messages: Sequence[Mapping[str, str]] | None = None, **fields: Any
) -> pb.GenerateRequest:
    """A GenerateRequest from plain values."""
    request = pb.GenerateRequest(**fields)
    if token_ids is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
    if messages is not None:
        request.messages.CopyFrom(pb.Messages(messages=[pb.Message(**message) for message in messages]))
    return request
