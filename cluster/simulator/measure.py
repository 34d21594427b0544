"""A running cluster's profile, from requests through its front door and what it says of each (`Timing`).

- Prompts one by one, one token each, which take no decode worker: time computing by length, and what comes on top.
- The same with two tokens: what the way over a decode worker adds, and the KV's way.
- Batches of a few sizes and contexts: the time between tokens while all of a batch run and no prompt is computed.
- Both together, where pools share a machine: by how much each slows the other. Where decode workers compute prompts:
  what these add to the steps of a batch.

All fits are those of `proto/step_time.py`: least squares of the relative error, no coefficient below 0.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...client.api import Client
from ...client.completion import Completion
from ...proto import baton_pb2 as api
from ...proto.errors import InternalError
from ...proto.step_time import Features, StepTime, StepTimeFit
from .profile import Profile
from .spec import LayeredTransfer, Overheads

_IDS = range(32, 256)
_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the grid keeps to. `longest`: tokens of a prompt and its answer."""

    longest: int
    max_sequences: int
    max_batch_tokens: int  # prompt tokens of a step, wherever they are computed
    repeats: int = 3
    steps: int = 40  # tokens of each answer of a batch
    together: bool = True  # also measure prompts and batches at the same time
    here: bool = False  # prompts are computed by the decode worker, beside its batch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of a worker's KV pool, as it says."""

    prefill: int
    decode: int


async def measure(client: Client, limits: Limits, blocks: Blocks, say: Say) -> Profile:
    """About a minute on two cores. Raises BatonError when the cluster does not answer."""
    rig = _Rig(client, limits, random.Random(time.time_ns()))
    await rig.prompt(64, 8)  # the first of all is no measure of anything
    say("prompts of several lengths")
    prefill, alone_s, prompts = await _prefill(rig)
    say("prompts that go on to a decode worker")
    transfer, with_decode_s = await _transfer(rig, prompts)
    say("batches of several sizes")
    decode, steps = await _decode(rig)
    message_s = max(0.0, (with_decode_s - alone_s) / 2)
    overheads = Overheads(router_s=max(0.0, alone_s - 2 * message_s), message_s=message_s)
    slows, beside = (1.0, 1.0), None
    if limits.here:
        say("prompts beside a batch")
        beside = await _beside(rig, decode)
    elif limits.together:
        say("both at the same time")
        slows = await _together(rig, prefill, decode)
    noise = statistics.pstdev(steps) * 3**0.5 if len(steps) > 2 else 0.0
    return Profile(
        "measured on the running cluster",
        prefill,
        decode,
        blocks.prefill,
        blocks.decode,
        transfer,
        overheads,
        min(noise, 0.2),
        slows[0],
        slows[1],
        beside,
    )


class _Rig:
    def __init__(self, client: Client, limits: Limits, rng: random.Random) -> None:
        self.client, self.limits, self._rng = client, limits, rng

    async def prompt(self, tokens: int, output: int) -> Completion:
        """One request of new contents."""
        ids = api.TokenIds(ids=self._rng.choices(_IDS, k=tokens))
        request = api.GenerateRequest(token_ids=ids, max_tokens=output, ignore_eos=True, temperature=0)
        done = await self.client.complete(request)
        if done.timing is None or not done.arrivals:
            raise InternalError(f"a request of {tokens} tokens ended without tokens or timing")
        return done

    def lengths(self, room: int) -> list[int]:
        """Those of the grid that leave so many tokens for the answer."""
        return [length for length in _LENGTHS if length + room <= self.limits.longest]

    def features(self, tokens: int) -> Features:
        """Of all steps of a prompt alone."""
        return float(-(-tokens // self.limits.max_batch_tokens)), float(tokens), float(tokens**2)


def _first_s(done: Completion) -> float:
    return done.arrivals[0][0] - done.started_s


def _timing(done: Completion) -> api.Timing:
    return done.timing or api.Timing()


async def _prefill(rig: _Rig) -> tuple[StepTime, float, dict[int, float]]:
    """The law, the median of what a client waits beside it, and the medians by length."""
    fit, besides, medians = StepTimeFit(), [], {}
    for length in rig.lengths(2):
        seconds = []
        for _ in range(rig.limits.repeats):
            done = await rig.prompt(length, 1)
            seconds.append(_timing(done).prefill_s)
            besides.append(_first_s(done) - _timing(done).prefill_s)
        medians[length] = statistics.median(seconds)
    for _ in range(3):  # a law is made of at least eight
        for length, seconds_each in medians.items():
            fit.observe(rig.features(length), seconds_each)
    return _law(fit), statistics.median(besides), medians


async def _transfer(rig: _Rig, prompts: dict[int, float]) -> tuple[LayeredTransfer, float]:
    """Seconds from the prompt's end to the decode worker's commit: a constant and a part for each token."""
    fit, besides = StepTimeFit(), []
    for length in prompts:
        commits = []
        for _ in range(rig.limits.repeats):
            done = await rig.prompt(length, 2)
            commits.append(_timing(done).commit_s)
            besides.append(_first_s(done) - _timing(done).prefill_s)
        for _ in range(3):
            fit.observe((1.0, float(length), 0.0), max(1e-6, statistics.median(commits)))
    law = _law(fit)
    return LayeredTransfer(law.a, law.b, 1), statistics.median(besides)


async def _decode(rig: _Rig) -> tuple[StepTime, list[float]]:
    """The law, and the relative errors of single batches under it."""
    fit, seen = StepTimeFit(), []
    output = rig.limits.steps
    contexts = [length for length in (32, rig.limits.longest // 2) if length + output <= rig.limits.longest]
    for context in contexts:
        context = min(context, 512)
        for batch in [size for size in _BATCHES if size <= rig.limits.max_sequences]:
            if batch * (context + output) > rig.limits.longest * 4 and batch > 16:
                continue
            found = await _batch(rig, batch, context, output)
            if found is not None:
                seen.append(found)
    for _ in range(2):
        for features, seconds in seen:
            fit.observe(features, seconds)
    law = _law(fit)
    return law, [seconds / law.seconds(features) - 1 for features, seconds in seen]


async def _batch(rig: _Rig, batch: int, context: int, output: int) -> tuple[Features, float] | None:
    """Features and seconds of a step while all of a batch ran: from the last first token to the first end."""
    answers = output + batch * (2 if batch > 8 else 0)
    dones = await asyncio.gather(*(rig.prompt(context, answers) for _ in range(batch)))
    begin = max(done.arrivals[0][0] for done in dones)
    end = min(done.arrivals[-1][0] for done in dones)
    moments = [[when for when, _ in done.arrivals if begin <= when <= end] for done in dones]
    counts = [sum(n for when, n in done.arrivals if begin < when <= end) for done in dones]
    if end <= begin or min(len(inside) for inside in moments) < 5:
        return None
    steps = statistics.mean(counts)
    said = statistics.mean(sum(n for when, n in done.arrivals if when <= begin) for done in dones) + steps / 2
    return (1.0, float(batch), batch * (context + said)), (end - begin) / steps


async def _together(rig: _Rig, prefill: StepTime, decode: StepTime) -> tuple[float, float]:
    """Time with the other pool at work / time alone: of prompts, of steps. Prompts go on to the decode worker, as they
    do under load; between two of them the prefill worker rests a little, so its share of the time is counted."""
    output = min(240, rig.limits.longest - 64)
    length = min(256, rig.limits.longest - 2)
    batch = min(4, rig.limits.max_sequences)
    streams = [asyncio.create_task(rig.prompt(32, output)) for _ in range(batch)]
    await asyncio.sleep(0.3)
    began, computing = time.monotonic(), 0.0
    slowed: list[float] = []
    while not any(stream.done() for stream in streams):
        done = await rig.prompt(length, 2)
        computing += _timing(done).prefill_s
        slowed.append(_timing(done).prefill_s / prefill.seconds(rig.features(length)))
    ended = time.monotonic()
    dones = await asyncio.gather(*streams)
    window_end = min(min(done.arrivals[-1][0] for done in dones), ended)
    ratios = []
    for done in dones:
        inside = [when for when, _ in done.arrivals if began <= when <= window_end]
        if len(inside) > 5:
            step = (inside[-1] - inside[0]) / (len(inside) - 1)
            ratios.append(step / decode.seconds((1.0, float(batch), batch * (32 + output / 2))))
    share = min(1.0, computing / (ended - began))
    return _ratio(slowed[:-1] or slowed), 1 + (_ratio(ratios) - 1) / max(share, 0.2)


async def _beside(rig: _Rig, decode: StepTime) -> StepTime | None:
    """What chunks of prompts add to a decode worker's steps: the time of a prompt, less what the steps that it was part
    of take without it. None: the answers ended too soon to see it."""
    output, batch = rig.limits.longest - 64, min(4, rig.limits.max_sequences)
    fit, began = StepTimeFit(), time.monotonic()
    streams = [asyncio.create_task(rig.prompt(32, output)) for _ in range(batch)]
    await asyncio.sleep(0.3)
    lengths = [length for length in rig.lengths(2) if length <= 1024] * rig.limits.repeats
    for length in lengths:
        done = await rig.prompt(length, 1)
        if any(stream.done() for stream in streams):
            break
        said = (time.monotonic() - began) / decode.seconds((1.0, float(batch), batch * 64.0))
        step_s = decode.seconds((1.0, float(batch), batch * (32 + min(said, output))))
        chunks, tokens, squares = rig.features(length)
        added_s = _timing(done).prefill_s - chunks * step_s
        if added_s > 0:
            fit.observe((0.0, tokens, squares), added_s)
    await asyncio.gather(*streams)
    return fit.solved()


def _ratio(values: Sequence[float]) -> float:
    return max(1.0, statistics.median(values)) if values else 1.0


def _law(fit: StepTimeFit) -> StepTime:
    law = fit.solved()
    if law is None:
        raise InternalError("too few measurements for a law; allow longer prompts or more of them")
    return law


def differ(one: Profile, other: Profile, prompt: int, batch: int, context: int) -> float:
    """The largest relative difference of the two in a prompt and in a step of this size."""
    pairs = [
        (one.prefill.seconds((1.0, prompt, prompt**2)), other.prefill.seconds((1.0, prompt, prompt**2))),
        (one.decode.seconds((1.0, batch, batch * context)), other.decode.seconds((1.0, batch, batch * context))),
    ]
    return max(abs(a - b) / min(a, b) for a, b in pairs)


def between(one: Profile, other: Profile) -> Profile:
    """The mean of two calibrations."""
    return Profile(
        f"mean of two calibrations: {one.source}",
        _mean(one.prefill, other.prefill),
        _mean(one.decode, other.decode),
        one.prefill_blocks,
        one.decode_blocks,
        LayeredTransfer(
            (one.transfer.alpha_s + other.transfer.alpha_s) / 2,
            (one.transfer.token_s + other.transfer.token_s) / 2,
            one.transfer.groups,
        ),
        Overheads(
            (one.overheads.router_s + other.overheads.router_s) / 2,
            (one.overheads.message_s + other.overheads.message_s) / 2,
        ),
        (one.noise + other.noise) / 2,
        (one.prefill_slowed + other.prefill_slowed) / 2,
        (one.decode_slowed + other.decode_slowed) / 2,
        _mean(one.prompts, other.prompts) if one.prompts and other.prompts else one.prompts or other.prompts,
    )


def _mean(one: StepTime, other: StepTime) -> StepTime:
    return StepTime(*((a + b) / 2 for a, b in zip(one, other, strict=True)))
