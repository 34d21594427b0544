"""Calls that no sane client makes: messages filled at random from their descriptors, bytes that are no messages, early
cancels and short deadlines. Everything follows from the seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

_TEXTS = ("", "a", "hello", "x" * 300, "\x00", "é世界🦜", "<|im_start|>", "{}", '{"do_remote_decode": true}', "tiny")
_INTS = (-(2**31), -1, 0, 1, 2, 3, 5, 17, 300, 2**31 - 1)
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-30, 0.5, 1.0, 2.0, 1e30)
_UNSIGNED = (0, 1, 2, 7, 300, 2**31, 2**32 - 1)
_OWN_FAILURE = "Internal error from Core"  # the client library's own, when it writes to a call that is over already
_GOOD = {"max_tokens": 3, "n": 1, "model_name": "tiny", "stream_interval": 1, "parallelism": 2}


@dataclass(frozen=True)
class Method:
    """One RPC. good: a request that is served. streaming: (requests, responses)."""

    path: str
    good: Any
    streaming: tuple[bool, bool] = (False, True)


@dataclass
class Outcome:
    """What came of the calls, by method and status name."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def _request(good: Any, rng: random.Random) -> Any:
    """The good one with a few fields damaged, or one that is filled at random."""
    message = type(good)()
    if rng.random() < 0.4:
        return fill(message, rng, list(message.DESCRIPTOR.fields), 0.5)
    message.CopyFrom(good)
    fields = list(message.DESCRIPTOR.fields)
    return fill(message, rng, rng.sample(fields, min(len(fields), rng.choice((0, 0, 1, 2, 3)))), 1.0)


def fill(message: Any, rng: random.Random, fields: Sequence[Any], share: float, depth: int = 0) -> Any:
    """Sets a share of the fields at random; a few of them to what is right, so that some calls get far."""
    for known in fields:
        if rng.random() > share:
            continue
        if known.name in _GOOD and rng.random() < 0.7:
            setattr(message, known.name, _GOOD[known.name])
        elif known.message_type is not None and known.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, known.name), known, rng)
        elif known.message_type is not None:
            for _ in range(rng.choice((1, 1, 2, 5)) if known.is_repeated else 1):
                child = getattr(message, known.name).add() if known.is_repeated else getattr(message, known.name)
                child.SetInParent()
                if depth < 4:
                    fill(child, rng, child.DESCRIPTOR.fields, 0.35, depth + 1)
        elif known.is_repeated:
            many = rng.choice((0, 1, 2, 20, 200))
            getattr(message, known.name).extend(_scalar(known, rng) for _ in range(many))
        else:
            setattr(message, known.name, _scalar(known, rng))
    return message


def _fill_map(target: Any, known: Any, rng: random.Random) -> None:
    key, value = (known.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.choice((1, 3, 40))):
        if value.message_type is not None:
            child = target[_scalar(key, rng)]
            fill(child, rng, child.DESCRIPTOR.fields, 0.35, 3)
        else:
            target[_scalar(key, rng)] = _scalar(value, rng)


def _scalar(known: Any, rng: random.Random) -> Any:
    kind = known.cpp_type
    if kind == known.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if known.type == known.TYPE_BYTES else text
    if kind == known.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (known.CPPTYPE_FLOAT, known.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS) if rng.random() < 0.3 else rng.random()
    if kind in (known.CPPTYPE_UINT32, known.CPPTYPE_UINT64):
        return rng.choice(_UNSIGNED) if rng.random() < 0.3 else rng.randrange(60)
    if kind == known.CPPTYPE_ENUM:
        return 0
    return rng.choice(_INTS) if rng.random() < 0.3 else rng.randrange(60)


async def fuzz(
    channel: grpc.aio.Channel,
    methods: Sequence[Method],
    calls: int,
    seed: int,
    *,
    at_once: int = 16,
    allowed: Callable[[str], bool],
) -> Outcome:
    """Makes `calls` calls, `at_once` at a time, each over within 30 s; `bad` lists statuses that are not allowed."""
    outcome, left = Outcome(), iter(range(calls))

    async def work() -> None:
        for number in left:
            rng = random.Random(f"{seed}/{number}")
            method = rng.choice(methods)
            try:
                status, said = await asyncio.wait_for(_call(channel, method, rng), 30)
            except TimeoutError:
                status, said = "HANGS", ""
            outcome.statuses[method.path, status] += 1
            if not allowed(status):
                outcome.bad.append(f"call {number} of seed {seed}: {method.path}: {status}: {said}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcome


async def _call(channel: grpc.aio.Channel, method: Method, rng: random.Random) -> tuple[str, str]:
    timeout = rng.choice((20.0, 20.0, 20.0, 0.02, 0.0))
    leave_after = rng.choice((None, None, None, 0, 1, 2))
    requests = [_bytes(method, rng) for _ in range(rng.choice((1, 1, 3)) if method.streaming[0] else 1)]
    make: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }[method.streaming]
    call: Any = make(method.path)(iter(requests) if method.streaming[0] else requests[0], timeout=timeout)
    try:
        if not method.streaming[1]:
            await call
        elif leave_after is None:
            async for _ in call:
                pass
        else:
            seen = 0
            async for _ in call:
                seen += 1
                if seen > leave_after:
                    call.cancel()
                    return "LEFT", ""
    except grpc.aio.AioRpcError as error:
        said = error.details() or ""
        return "CLIENT" if said == _OWN_FAILURE else error.code().name, said
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return "CLIENT", "cancelled by the library"
    finally:
        call.cancel()
    return "OK", ""


def _bytes(method: Method, rng: random.Random) -> bytes:
    data: bytes = _request(method.good, rng).SerializeToString()
    dice = rng.random()
    if dice < 0.05:
        return rng.randbytes(rng.randrange(64))
    if dice < 0.10 and data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return data
