"""A running cluster's profile, from requests through its front door and what it says of each (`Timing`).

- Prompts one by one, which go on to a decode worker as under load: time computing by length, what comes on top, and the
  KV's way. The same with one token, which take no decode worker: what the way over it adds.
- Batches of a few sizes and contexts: the time between tokens while all of a batch run and no prompt is computed.
- Both together, where pools share a machine: by how much each slows the other.

All of it in rounds, so that a machine that changes its speed meanwhile does so for everything; medians are fitted, as
in `proto/step_time.py`: least squares of the relative error, no coefficient below 0.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...client.api import Client
from ...proto.errors import InternalError
from ...proto.step_time import Features, StepTime, StepTimeFit
from .measure_rig import Limits, Rig, first_s, timing_of
from .measure_together import together
from .profile import Profile
from .spec import LayeredTransfer, Overheads

_CONTEXTS = (32, 256)
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LONG_BATCHES = 16  # with the longer context, whose prompts take long
_LEAST = 8  # of observations, for a law
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of a worker's KV pool, as it says."""

    prefill: int
    decode: int


@dataclass
class _Seen:
    """Seconds, by what was asked for."""

    prompts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    commits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    besides: list[float] = field(default_factory=list)  # of a client's wait, that no computing explains
    alone: list[float] = field(default_factory=list)  # the same of prompts that take no decode worker
    steps: dict[tuple[int, int], list[tuple[Features, float]]] = field(default_factory=lambda: defaultdict(list))
    slows: list[tuple[float, float]] = field(default_factory=list)


async def measure(client: Client, limits: Limits, blocks: Blocks, say: Say) -> Profile:
    """About half a minute on two cores for each round. Raises BatonError when the cluster does not answer."""
    rig, seen = Rig(client, limits, random.Random(time.time_ns())), _Seen()
    await rig.prompt(64, 8)  # the first of all is no measure of anything
    for number in range(limits.rounds):
        say(f"round {number + 1} of {limits.rounds}: prompts")
        await _prompts(rig, seen)
        prefill = _prefill_law(rig, seen)
        say("batches")
        await _batches(rig, seen, prefill)
        decode = law_of(_medians(seen))
        if limits.together:
            say("both at the same time")
            seen.slows += await together(rig, prefill, decode)
    return _profile(rig, seen, blocks)


def _profile(rig: Rig, seen: _Seen, blocks: Blocks) -> Profile:
    steps = _medians(seen)
    decode = law_of(steps)
    residuals = [seconds / decode.seconds(features) - 1 for features, seconds in steps]
    alone_s, besides_s = statistics.median(seen.alone), statistics.median(seen.besides)
    message_s = max(0.0, (besides_s - alone_s) / 2)
    noise = statistics.pstdev(residuals) * 3**0.5 if len(residuals) > 2 else 0.0
    slows = [max(1.0, statistics.fmean(values)) for values in zip(*seen.slows, strict=True)] or [1.0, 1.0]
    return Profile(
        "measured on the running cluster",
        _prefill_law(rig, seen),
        decode,
        blocks.prefill,
        blocks.decode,
        _transfer(seen),
        Overheads(router_s=max(0.0, alone_s - 2 * message_s), message_s=message_s),
        min(noise, 0.2),
        slows[0],
        slows[1],
        tuple((features[1], features[2], seconds) for features, seconds in steps),
    )


async def _prompts(rig: Rig, seen: _Seen) -> None:
    for length in rig.lengths(2):
        for _ in range(1 + (length <= 512)):
            done = await rig.prompt(length, 2)
            computing_s = timing_of(done).prefill_s
            seen.prompts[length].append(computing_s)
            seen.besides.append(first_s(done) - computing_s)
            seen.commits[length].append(timing_of(done).commit_s)
        if length <= 256:
            done = await rig.prompt(length, 1)
            seen.alone.append(first_s(done) - timing_of(done).prefill_s)


async def _batches(rig: Rig, seen: _Seen, prefill: StepTime) -> None:
    step_s = 1e-3
    for context in _CONTEXTS:
        for batch in (size for size in _BATCHES if size <= rig.limits.max_sequences):
            if context > _CONTEXTS[0] and batch > _LONG_BATCHES:
                break
            before_s = batch * prefill.seconds(rig.features(context))  # of the prompts, one after the other
            found = await rig.batch(batch, context, before_s / step_s)
            if found is not None:
                seen.steps[batch, context].append(found)
                step_s = found[1]


def _prefill_law(rig: Rig, seen: _Seen) -> StepTime:
    return law_of([(rig.features(length), statistics.median(values)) for length, values in seen.prompts.items()])


def _medians(seen: _Seen) -> list[tuple[Features, float]]:
    """Each point of the grid with the middle one of its steps."""
    return [sorted(values, key=lambda step: step[1])[len(values) // 2] for values in seen.steps.values()]


def _transfer(seen: _Seen) -> LayeredTransfer:
    """The KV's way as the decode worker sees it, by tokens."""
    found = [((1.0, float(n), 0.0), max(1e-6, statistics.median(values))) for n, values in seen.commits.items()]
    law = law_of(found)
    return LayeredTransfer(law.a, law.b, 1)


def law_of(observed: Sequence[tuple[Features, float]]) -> StepTime:
    """Raises InternalError where nothing was observed."""
    fit = StepTimeFit()
    for _ in range(max(1, -(-_LEAST // max(1, len(observed))))):
        for features, seconds in observed:
            fit.observe(features, seconds)
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
        (*one.steps, *other.steps),
    )


def _mean(one: StepTime, other: StepTime) -> StepTime:
    return StepTime(*((a + b) / 2 for a, b in zip(one, other, strict=True)))
