"""Steps on a GPU that are queued before the tokens of the step before are known: the answers are those without that.

The engine for GPUs on CPU tensors, its kernels in plain torch; workers are real ones in threads, over the wire.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.device_edge import HostEdge, Mark
from baton.engine.device_flight import Flight, can_run_ahead, next_step
from baton.engine.device_kv import DeviceKV
from baton.engine.device_runner import DeviceRunner
from baton.engine.params import EngineParams, SpeculationParams
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.step import Draw, SampledToken, SequenceStep
from baton.proto.errors import InternalError
from baton.proto.kv_layout import KVLayout, block_count
from baton.proto.sampling import SamplingParams
from baton.tests.harness import plain_kernels
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.tiny_model import EOS, special_id
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import leg_message, pair
from baton.tests.test_engine_runner import build
from baton.text import grammar

SIZE = 4


class WatchedEdge(HostEdge):
    """Notes what is queued, and when the host waits for the end of which step."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.steps = 0

    def mark(self) -> Mark:
        """See Edge."""
        return _Watched(self.log, self.steps)


class _Watched:
    def __init__(self, log: list[str], step: int) -> None:
        self._log, self._step = log, step

    def wait(self) -> None:
        """Noted."""
        if self._log[-1:] != [f"wait {self._step}"]:
            self._log.append(f"wait {self._step}")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels.install(monkeypatch)


def device(model: Path, edge: HostEdge | None = None, **changes: Any) -> DeviceRunner:
    params = engine_params(model, **changes)
    return DeviceRunner(params, SingleRank(), lambda done, total: None, None, edge or HostEdge())


class Batch:
    """Some sequences, each with blocks of its own and room to run ahead; `ask` runs them all for one step."""

    def __init__(self, runner: Runner, wanted: dict[str, tuple[list[int], SamplingParams]]) -> None:
        self.runner = runner
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.said: dict[str, list[SampledToken]] = {}
        self.tables: dict[str, list[int]] = {}
        self.free = list(range(runner.blocks))
        for name, (prompt, params) in wanted.items():
            self.join(name, prompt, params)

    def join(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """Its prompt is computed, and its first token drawn."""
        table = [self.free.pop(0) for _ in range(block_count(len(prompt) + 2, SIZE))]
        self.wanted[name], self.tables[name] = (prompt, params), table
        step = SequenceStep(name, 1, 0, prompt, 0, table, Draw(params, (0,), prompt, []))
        state = vars(self.runner)
        flight = state.get("_flight")
        self.said[name] = list(self.runner.prefill([step], None)[0])
        if flight is not None:  # as if the KV had come from elsewhere
            state["_flight"] = flight

    def leave(self, name: str) -> None:
        """Its blocks are the first ones to be given to others."""
        self.free = self.tables.pop(name) + self.free

    def step(self, name: str) -> SequenceStep:
        (prompt, params), said = self.wanted[name], [token.token_id for token in self.said[name]]
        start = len(prompt) + len(said) - 1
        while len(self.tables[name]) * SIZE < start + 2:
            self.tables[name].append(self.free.pop(0))
        return SequenceStep(name, 1, 0, [said[-1]], start, self.tables[name], Draw(params, (0,), prompt, said))

    def ask(self, ahead: bool) -> int:
        """How many got a token; who has ended leaves."""
        names = list(self.tables)
        steps = [self.step(name) for name in names]
        rows = self.runner.decode_ahead(steps) if ahead else self.runner.decode(steps)
        for name, row in zip(names, rows, strict=True):
            self.said[name] += row
            _, params = self.wanted[name]
            ids = [token.token_id for token in self.said[name]]
            if row and (len(ids) == params.max_tokens or ids[-1] in params.stop_token_ids):
                self.leave(name)
        return sum(map(len, rows))

    def run(self, ahead: bool) -> dict[str, list[SampledToken]]:
        """To the end of all."""
        while self.tables:
            self.ask(ahead)
        return self.said


def prompt_of(length: int, seed: int) -> list[int]:
    return [(i * i * 31 + 17 * i + 101 * seed + length) % 250 for i in range(length)]


def settings(number: int) -> SamplingParams:
    """Greedy and sampled, with logprobs, stop ids that come, minima, a bias."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 40, "logprobs": 2},
        {"temperature": 1.4, "top_p": 0.9, "stop_token_ids": frozenset(range(0, 250, 6))},
        {"temperature": 1.2, "stop_token_ids": frozenset(range(0, 250, 3)), "min_tokens": 5, "logit_bias": {7: 2.0}},
    ]
    return sampling(max_tokens=3 + number % 17, seed=number, **kinds[number % len(kinds)])


def same(found: dict[str, list[SampledToken]], expected: dict[str, list[SampledToken]]) -> None:
    assert {name: [t.token_id for t in row] for name, row in found.items()} == {
        name: [t.token_id for t in row] for name, row in expected.items()
    }
    for name, row in found.items():
        for ours, theirs in zip(row, expected[name], strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            assert (ours.logprob or 0) == pytest.approx(theirs.logprob or 0, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_batch_that_ends_piece_by_piece(tiny_dir: Path) -> None:
    wanted = {f"r{n}": (prompt_of(3 + n, n), settings(n)) for n in range(12)}
    expected = Batch(build(tiny_dir, kv_blocks=128), wanted).run(ahead=False)
    same(Batch(device(tiny_dir, kv_blocks=128), wanted).run(ahead=True), expected)
    assert len({len(row) for row in expected.values()}) > 5


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_goes_and_is_taken_out_changes_nothing(tiny_dir: Path, seed: int) -> None:
    """Joins, cancels, and freed blocks that are given away at once, between any two steps."""
    rng = random.Random(seed)
    batch = Batch(device(tiny_dir, kv_blocks=96), {})
    cancelled: set[str] = set()
    for number in range(30):
        while len(batch.tables) > 8 or (batch.tables and rng.random() < 0.7):
            batch.ask(ahead=True)
        if batch.tables and rng.random() < 0.3:
            gone = rng.choice(list(batch.tables))
            cancelled.add(gone)
            batch.leave(gone)
        batch.join(f"r{number}", prompt_of(rng.randint(1, 14), number), settings(number))
    batch.run(ahead=True)
    expected = Batch(build(tiny_dir, kv_blocks=400), batch.wanted).run(ahead=False)
    same(batch.said, {name: row[: len(batch.said[name])] for name, row in expected.items()})
    assert all(len(batch.said[name]) == len(row) for name, row in expected.items() if name not in cancelled)


def test_the_next_step_is_queued_before_the_host_waits(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """queue 1, queue 2, wait 1, queue 3, wait 2, ...: two are under way, and none at the end."""
    edge = WatchedEdge()
    runner = device(tiny_dir, edge)
    batch = Batch(runner, {"a": (prompt_of(5, 1), sampling(max_tokens=6))})
    put = runner._queue.put
    inputs: list[int] = []

    def noted(steps: Sequence[SequenceStep], prior: Any) -> Any:
        edge.steps += 1
        edge.log.append(f"queue {edge.steps}")
        inputs.append(steps[0].tokens[0])
        return put(steps, prior)

    monkeypatch.setattr(runner._queue, "put", noted)
    edge.log.clear()
    batch.run(ahead=True)
    pairs = [part for step in range(1, 5) for part in (f"queue {step + 1}", f"wait {step}")]
    assert edge.log == ["queue 1", *pairs, "wait 5"]
    assert inputs == [batch.said["a"][0].token_id, -1, -1, -1, -1]
    assert runner._flight is None


def test_what_needs_the_host_runs_step_by_step(tiny_dir: Path) -> None:
    """A grammar or a penalty keeps its whole batch from running ahead, and it goes on afterwards."""
    ends = frozenset({special_id(EOS)})
    held = {
        "grammar": sampling(
            grammar=grammar.from_regex("[a-c]{2,5}-[0-9]+"), temperature=1.0, max_tokens=9, stop_token_ids=ends
        ),
        "penalty": sampling(repetition_penalty=1.3, max_tokens=5),
    }
    runners = device(tiny_dir, kv_blocks=96), build(tiny_dir, kv_blocks=96)
    for name, params in held.items():
        found = []
        for runner in runners:
            batch = Batch(runner, {"long": (prompt_of(9, 2), sampling(max_tokens=20))})
            for _ in range(3):
                batch.ask(ahead=True)
            batch.join(name, prompt_of(6, 3), params)
            assert batch.ask(ahead=True) == (1 if runner.ahead else 2)  # what is under way, then all together
            assert batch.ask(ahead=True) == 2
            found.append(batch.run(ahead=True))
        same(*found)
    assert not any(can_run_ahead(step_of(params)) for params in held.values())


def test_one_that_joins_waits_for_the_step_that_is_under_way(tiny_dir: Path) -> None:
    batch = Batch(device(tiny_dir), {"a": (prompt_of(5, 1), sampling(max_tokens=12))})
    assert batch.ask(ahead=True) == 1
    batch.join("b", prompt_of(5, 2), sampling(max_tokens=12))
    assert batch.ask(ahead=True) == 1  # of a
    assert batch.ask(ahead=True) == 2


def step_of(params: SamplingParams, **changes: Any) -> SequenceStep:
    values: dict[str, Any] = {"tokens": [5], "start": 6, "blocks": [1, 2], "draw": Draw(params, (0,), [1] * 4, [2] * 3)}
    return SequenceStep("a", 0, 0, **{**values, **changes})


def test_what_follows_a_step() -> None:
    """Its token comes from the device, its position and its count are one more; nothing follows where it ends."""
    step = step_of(sampling(max_tokens=9))
    following = next_step(step, 3, 4, 100)
    assert following is not None
    assert following.draw is not None
    assert (list(following.tokens), following.start, len(following.draw.generated)) == ([-4], 7, 4)
    assert next_step(step_of(sampling(max_tokens=4)), 3, 4, 100) is None
    assert next_step(step, 3, 4, 7) is None  # the context is full
    assert next_step(step_of(sampling(max_tokens=9), start=7), 3, 4, 100) is None  # the blocks are
    for odd in (
        {"tokens": [5, 6], "proposed": 1},
        {"draw": None},
        {"draw": Draw(sampling(), (0, 1), [1], [2])},
        {"draw": Draw(sampling(presence_penalty=0.1), (0,), [1], [2])},
    ):
        assert not can_run_ahead(step_of(sampling(), **odd))


def test_who_is_given_a_block_of_one_that_has_ended_waits(tiny_dir: Path) -> None:
    """A step under way writes there; other blocks are filled at once."""
    layout = KVLayout("f", 1, 1, 4, "rope", "float32", SIZE, ((0, 1),))
    pool = DeviceKV(layout, 0, 8, HostEdge())
    log: list[str] = []
    for number, blocks in enumerate(([0], [1, 2], [3])):
        pool.runs_ahead(blocks, _Watched(log, number))
    payload = torch.zeros(1, 2, 1, SIZE, 4)
    cases: list[tuple[int, list[str]]] = [(0, []), (5, []), (2, ["wait 1"]), (3, ["wait 1", "wait 2"])]
    for block, expected in cases:
        pool.scatter([block], (0, 1), (0, 1), (0, SIZE), payload)
        assert log == expected


def test_logits_that_are_no_numbers_matter_only_to_those_who_are_there(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device(tiny_dir)
    batch = Batch(runner, {"a": (prompt_of(5, 1), sampling(max_tokens=9)), "b": (prompt_of(6, 2), sampling())})
    batch.ask(ahead=True)

    def nothing_drawn(row: int) -> None:
        assert runner._flight is not None
        download = runner._flight._drawn._download
        assert download is not None
        with torch.inference_mode():
            download.wait()[0][row] = -1

    nothing_drawn(1)
    batch.leave("b")
    assert batch.ask(ahead=True) == 1
    nothing_drawn(0)
    with pytest.raises(InternalError, match="not numbers"):
        batch.ask(ahead=True)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[DeviceRunner]:
    """Decode workers of `device: cpu` run the engine for GPUs; prefill workers keep theirs."""
    made: list[DeviceRunner] = []

    def make(params: EngineParams, group: Any, progress: Any, broadcast: Any) -> Runner:
        if params.layer_group == 1:
            return Runner(params, group, progress, broadcast)
        made.append(DeviceRunner(params, group, progress, broadcast, HostEdge()))
        return made[-1]

    monkeypatch.setattr("baton.engine.rank_start.make_runner", make)
    return made


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that were queued ahead, and how many of them were asked for."""
    counts = {"ahead": 0, "asked": 0}
    take_off, rows_of = DeviceRunner._take_off, Flight.rows_of

    def noted(self: DeviceRunner, steps: Sequence[SequenceStep], prior: Any) -> Any:
        counts["ahead"] += sum(step.tokens[0] < 0 for step in steps)
        return take_off(self, steps, prior)

    def found(self: Any, steps: Sequence[SequenceStep]) -> dict[int, int]:
        rows = rows_of(self, steps)
        counts["asked"] += len(rows)
        return rows

    monkeypatch.setattr(DeviceRunner, "_take_off", noted)
    monkeypatch.setattr(Flight, "rows_of", found)
    return counts


@pytest.mark.parametrize(("ranks", "speculates"), [(1, False), (2, False), (1, True)])
async def test_a_full_pool_of_workers_says_what_one_engine_says(
    tiny_dir: Path, on_device: list[DeviceRunner], dropped: dict[str, int], ranks: int, speculates: bool
) -> None:
    """Preemption, choices, stop ids, logprobs, penalties, two ranks, proposals; over real workers."""
    rng = random.Random(7)
    ends = frozenset(range(0, 250, 9))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 4, "n": 2},
        {"temperature": 1.1, "seed": 9, "stop_token_ids": ends, "logprobs": 1},
        {"repetition_penalty": 1.2},
    ]
    asked = [
        (
            prompt_of(rng.randint(1, 20), index),
            {"max_tokens": rng.randint(2, 30), **kinds[0 if index < 6 else index % 4]},
        )
        for index in range(16)
    ]
    decode = engine_params(tiny_dir, kv_blocks=20, tensor_parallel=ranks, layer_group=2)
    speculation = SpeculationParams("prompt_lookup" if speculates else "none", 3, "", 1 << 20)
    params = decode_params(decode, reserve_wait_s=60.0, speculation=speculation)
    async with pair(prefill_params(engine_params(tiny_dir)), params) as router:
        answers = await asyncio.gather(*(router.generate(prompt, sampling(**how)) for prompt, how in asked))
        assert router.decode.load.preemptions > 0
    assert len(on_device) == ranks
    alone = Monolithic(tiny_dir)
    for (prompt, how), answer in zip(asked, answers, strict=True):
        expected = alone.run(prompt, **how)
        assert [answer.ids(number) for number in range(len(expected))] == [choice.token_ids for choice in expected]
    if not speculates:
        assert dropped["ahead"] > dropped["asked"] / 3 > 10


async def test_cancels_in_flight_leave_no_block_and_the_worker_goes_on(
    tiny_dir: Path, on_device: list[DeviceRunner], dropped: dict[str, int]
) -> None:
    rng = random.Random(3)
    params = decode_params(engine_params(tiny_dir, kv_blocks=256, layer_group=2))
    async with pair(prefill_params(engine_params(tiny_dir)), params) as router:
        for wave in range(2):
            legs = [
                leg_message(prompt_of(rng.randint(1, 30), 10 * wave + n), sampling(max_tokens=60)) for n in range(8)
            ]
            await asyncio.gather(*(router.run_and_cancel(leg, rng.random() * 0.3) for leg in legs))
            await router.prefill.wait_idle()
            await router.decode.wait_idle()
        prompt = prompt_of(20, 99)
        answer = await router.generate(prompt, sampling(max_tokens=30))
    assert answer.ids() == Monolithic(tiny_dir).run(prompt, max_tokens=30)[0].token_ids
    assert on_device
    assert dropped["asked"] > 20
