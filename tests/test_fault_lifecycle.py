"""LC-* and KV-* cases on one prefill and one decode process: clients that leave, leases that end, news that is lost.

Each case holds the processes at a named point, so nothing depends on timing; after each the pools are empty, the
accounts agree, and a probe is served.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.tests.harness import oracles
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.one_pair import (
    CHUNK,
    EIGHT,
    GATES,
    LEASE_S,
    Cluster,
    Messages,
    cancel_at,
    counted,
    kv_link,
    leave,
    one_pair,
    right_or_unavailable,
    session,
    until,
)
from baton.tests.harness.reader import Reader, ids


@pytest.fixture(scope="module")
def oracle(tiny_dir: Path) -> Monolithic:
    return Monolithic(tiny_dir)


@pytest.fixture(scope="module")
def started(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with one_pair(tmp_path_factory.mktemp("lifecycle"), tiny_dir) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.gates.release_all()
    started.rig.wait_live()
    started.rig.quiesce()


# ---- cancel at every gate ------------------------------------------------------------------------------------------


def test_lc_07_cancel_at_every_gate(cluster: Cluster) -> None:
    """One by one, each twice; every case of the matrix in the field reports is among them."""
    for point in (*EIGHT, *EIGHT):
        cancel_at(cluster, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", GATES)
def test_lc_07_cancel_at_all_points(cluster: Cluster, point: str) -> None:
    for _ in range(5):
        cancel_at(cluster, point)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_cancels_at_eight_gates_leave_full_pools_within_two_seconds(cluster: Cluster) -> None:
    took: dict[str, list[float]] = {point: [] for point in EIGHT}
    for number in range(200):
        point = EIGHT[number % len(EIGHT)]
        took[point].append(cancel_at(cluster, point))
    cluster.rig.quiesce()
    worst = {point: max(seconds) for point, seconds in took.items()}
    print("pools full again after at most", {point: f"{seconds:.3f} s" for point, seconds in worst.items()})
    assert max(worst.values()) < 2.0


# ---- LC ------------------------------------------------------------------------------------------------------------


def abort_then(cluster: Cluster, how: str) -> None:
    """LC-01: the client leaves before the first block is sent; then prefill dies, or its last word is lost."""
    rig, gates, _ = cluster
    rig.wait_all_ready()
    gates.close("prefill.first_frame")
    reader = Reader(rig, ids(40), 30)
    gates.wait_reached("prefill.first_frame")
    leave(rig, reader)
    if how == "killed":
        rig.kill_worker("prefill-0")
    else:
        kv_link(cluster).faults["up"].swallow = True
    gates.release("prefill.first_frame")
    until(lambda: not counted(rig, "baton_kv_used_blocks", role="decode"), "decode keeps blocks", 5.0)
    rig.wait_live()
    rig.quiesce()


@pytest.mark.parametrize("how", ["mute"])
def test_lc_01_an_abort_before_the_first_block_waits_for_nobody(cluster: Cluster, how: str) -> None:
    abort_then(cluster, how)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["killed", "mute"])
def test_lc_01_twenty_aborts(cluster: Cluster, how: str) -> None:
    for _ in range(20):
        abort_then(cluster, how)


def test_a_link_that_breaks_behind_the_last_frame_sends_nothing_again(cluster: Cluster, oracle: Monolithic) -> None:
    """Prefill does not hear that decode has everything, and says so before decode says that it goes on."""
    rig, gates, _ = cluster
    rig.client.generate(5, token_ids=ids(8), max_tokens=2, ignore_eos=True)  # a link is open
    failed, retries = counted(rig, "baton_kv_transfers_total", outcome="failed"), counted(rig, "baton_retries_total")
    gates.close("prefill.mid_frame")
    gates.close("decode.committed")
    reader = Reader(rig, ids(12), 20)
    gates.wait_reached("prefill.mid_frame")
    link = kv_link(cluster)
    link.faults["down"].swallow = True
    gates.release("prefill.mid_frame")
    gates.wait_reached("decode.committed")
    link.cut()
    until(lambda: counted(rig, "baton_kv_transfers_total", outcome="failed") > failed, "prefill does not notice")
    gates.release("decode.committed")
    outcome = reader.end(20)
    assert outcome.answer is not None
    assert outcome.answer.token_ids == oracle.run(reader.prompt, max_tokens=20)[0].token_ids
    assert outcome.answer.timing.attempts == 1
    assert counted(rig, "baton_retries_total") == retries


@pytest.mark.parametrize("rounds", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_lc_02_cancel_between_prefill_done_and_decode_told(cluster: Cluster, rounds: int) -> None:
    """The news is at the router, which does not look, and no frame is sent; the prefill pool has room for three."""
    rig, gates, _ = cluster
    before = counted(rig, "baton_requests_cancelled_total")
    for _ in range(rounds):
        gates.close("router.handoff")
        gates.close("prefill.first_frame")
        reader = Reader(rig, ids(80), 10)
        gates.wait_reached("router.handoff")
        leave(rig, reader)
        gates.release_all()
        assert reader.end(10).code is grpc.StatusCode.CANCELLED
    oracles.check_pool(rig.http)
    assert counted(rig, "baton_requests_cancelled_total") == before + rounds
    assert rig.client.generate(5, token_ids=ids(80), max_tokens=2, ignore_eos=True).timing.attempts == 1


def test_lc_05_reservations_without_blocks_are_cancelled(cluster: Cluster, oracle: Monolithic) -> None:
    """Two requests fill the decode pool; four wait in its line, and leave it."""
    rig, gates, _ = cluster
    gates.close("prefill.first_frame")
    served = [Reader(rig, ids(60), 3) for _ in range(2)]
    until(lambda: counted(rig, "baton_kv_used_blocks", role="decode") == 32, "the pool is not full")
    waiting = [Reader(rig, ids(60), 3) for _ in range(4)]
    until(lambda: counted(rig, "baton_worker_waiting", role="decode") > 0, "nobody waits")
    for reader in waiting:
        leave(rig, reader)
    until(lambda: not counted(rig, "baton_worker_waiting", role="decode"), "somebody waits still")
    assert counted(rig, "baton_kv_used_blocks", role="decode") == 32
    gates.release("prefill.first_frame")
    assert all(right_or_unavailable(reader, oracle, 3) for reader in served)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_lc_08_a_session_that_is_reset_ends_its_requests_soon(cluster: Cluster, oracle: Monolithic, role: str) -> None:
    """Both legs of twenty requests are at work: each is answered right, or refused for a retry, soon."""
    rig, gates, _ = cluster
    rig.wait_all_ready()
    gates.close("decode.admit")
    readers = [Reader(rig, ids(12), 4) for _ in range(20)]
    gates.wait_reached("decode.admit")
    session(cluster, f"{role}-0").cut()
    gates.release("decode.admit")
    began = time.monotonic()
    for reader in readers:
        right_or_unavailable(reader, oracle, 4)
    assert time.monotonic() - began < 15


def test_lc_08_a_prefill_that_raises_frees_its_sibling(cluster: Cluster) -> None:
    rig, gates, _ = cluster
    gates.close("prefill.frame")
    readers = [Reader(rig, ids(12), 4) for _ in range(10)]
    assert {reader.end(15).code for reader in readers} == {grpc.StatusCode.INTERNAL}
    oracles.check_pool(rig.http)


@pytest.mark.slow
def test_lc_08_a_decode_that_nobody_can_dial(cluster: Cluster) -> None:
    """New KV links are accepted and never answered: an error within the connect limit of each attempt."""
    rig, _, proxy = cluster
    rig.wait_all_ready()
    proxy.blackhole = True
    try:
        kv_link(cluster).cut()
        readers = [Reader(rig, ids(12), 4) for _ in range(8)]  # as many as decode has blocks for at a time
        assert {reader.end(25).code for reader in readers} == {grpc.StatusCode.UNAVAILABLE}
    finally:
        proxy.blackhole = False
    oracles.check_pool(rig.http)


@pytest.mark.parametrize("chunk", range(1, 6))
def test_lc_09_abort_between_a_chunk_and_its_result(cluster: Cluster, oracle: Monolithic, chunk: int) -> None:
    """Nothing of what was in flight counts as computed: the prompt sent again finds the chunks before it at most."""
    rig, gates, _ = cluster
    gates.close("prefill.chunk_done")
    reader = Reader(rig, ids(5 * CHUNK), 4)
    for _ in range(chunk - 1):
        gates.wait_reached("prefill.chunk_done")
        gates.let_one("prefill.chunk_done")
    gates.wait_reached("prefill.chunk_done")
    leave(rig, reader)
    gates.release("prefill.chunk_done")
    rig.quiesce()
    again = rig.client.generate(token_ids=reader.prompt, max_tokens=4, temperature=0, ignore_eos=True)
    assert again.token_ids == oracle.run(reader.prompt, max_tokens=4)[0].token_ids
    assert again.timing.prefill_cached_tokens == (chunk - 1) * CHUNK


def test_lc_11_a_full_pool_is_reaped_by_the_clock(cluster: Cluster) -> None:
    """Reservations fill the decode pool, their clients leave, and no cancel arrives; then nothing is sent at all."""
    rig, gates, _ = cluster
    gates.close("prefill.first_frame")
    readers = [Reader(rig, ids(60), 60) for _ in range(2)]  # 16 blocks each, of 32
    until(lambda: counted(rig, "baton_kv_used_blocks", role="decode") == 32, "the pool is not full")
    lost = session(cluster, "decode-0")
    lost.faults["up"].swallow = True
    for reader in readers:
        leave(rig, reader)
    assert counted(rig, "baton_kv_used_blocks", role="decode") == 32
    gates.release("prefill.first_frame")
    until(lambda: not lost.open, "the silent session does not end", 5 * LEASE_S)
    rig.wait_live()
    rig.quiesce()


@pytest.mark.slow
def test_lc_13_decode_killed_with_transfers_pending(cluster: Cluster, oracle: Monolithic) -> None:
    rig, gates, _ = cluster
    rig.wait_all_ready()
    gates.close("prefill.first_frame")
    readers = [Reader(rig, ids(20), 4) for _ in range(4)]
    until(lambda: counted(rig, "baton_kv_held_legs", role="prefill") == 4, "prefill is not done")
    rig.kill_worker("decode-0")
    until(lambda: not counted(rig, "baton_kv_used_blocks", role="prefill"), "prefill keeps blocks", 5 * LEASE_S)
    gates.release("prefill.first_frame")
    for reader in readers:
        right_or_unavailable(reader, oracle, 4)


def test_lc_13_a_busy_decode_keeps_its_leases(cluster: Cluster, oracle: Monolithic) -> None:
    """Its engine stands still for longer than a lease, its heart does not."""
    rig, gates, _ = cluster
    rig.wait_all_ready()
    gates.close("decode.admit")
    reader = Reader(rig, ids(40), 8)
    gates.wait_reached("decode.admit")
    time.sleep(1.5 * LEASE_S)
    gates.release("decode.admit")
    assert right_or_unavailable(reader, oracle, 8)
    assert reader.answer.timing.attempts == 1


def test_lc_13_a_frozen_decode_never_uses_what_was_freed(cluster: Cluster, oracle: Monolithic) -> None:
    rig, gates, _ = cluster
    rig.wait_all_ready()
    gates.close("decode.frame")
    reader = Reader(rig, ids(40), 8)
    gates.wait_reached("decode.frame")
    pid = rig.pid("decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        gates.release("decode.frame")
        until(lambda: not counted(rig, "baton_kv_used_blocks", role="prefill"), "prefill keeps blocks", 5 * LEASE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    right_or_unavailable(reader, oracle, 8)


# ---- KV ------------------------------------------------------------------------------------------------------------


def test_kv_06_a_damaged_payload_is_sent_again(cluster: Cluster, oracle: Monolithic) -> None:
    """A flipped bit is never placed: the leg fails, and the next attempt is right."""
    rig, gates, _ = cluster
    before = counted(rig, "baton_kv_transfers_total", outcome="failed")
    gates.close("decode.payload")
    gates.close("decode.mid_frame")
    reader = Reader(rig, ids(40), 8)
    gates.wait_reached("decode.mid_frame")
    gates.let_one("decode.mid_frame")
    until(lambda: counted(rig, "baton_kv_transfers_total", outcome="failed") > before, "no transfer failed")
    gates.wait_reached("decode.mid_frame")  # of the next attempt
    gates.release("decode.payload")
    gates.release("decode.mid_frame")
    assert right_or_unavailable(reader, oracle, 8)
    assert reader.answer.timing.attempts == 2


def test_kv_08_blocks_of_a_lease_that_ended_are_never_sent(cluster: Cluster, oracle: Monolithic) -> None:
    """Prefill loses its session while a frame waits to be gathered; other prompts are computed into the same blocks."""
    rig, gates, _ = cluster
    before = counted(rig, "baton_retries_total") + counted(rig, "baton_requests_failed_total")
    gates.close("prefill.first_frame")
    first = Reader(rig, ids(80), 6)
    gates.wait_reached("prefill.first_frame")
    session(cluster, "prefill-0").cut()
    until(lambda: counted(rig, "baton_kv_total_blocks", role="prefill") == 0, "the session does not end")
    until(lambda: counted(rig, "baton_kv_total_blocks", role="prefill") == 64, "the session does not come back")
    others = [Reader(rig, ids(80), 6) for _ in range(1)]
    until(lambda: counted(rig, "baton_kv_held_legs", role="prefill") > 0, "nothing is computed")
    gates.release("prefill.first_frame")
    right_or_unavailable(first, oracle, 6)
    assert all(right_or_unavailable(other, oracle, 6) for other in others)
    assert counted(rig, "baton_retries_total") + counted(rig, "baton_requests_failed_total") > before


@pytest.mark.parametrize("requests", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_kv_10_decode_computes_no_prompt(cluster: Cluster, requests: int) -> None:
    """Every step that decode ran gave out a token: of all the prompts it computed none."""
    rig, count = cluster.rig, 4
    steps = counted(rig, "baton_worker_steps_total", role="decode")
    computed = counted(rig, "baton_computed_prompt_tokens_total", role="prefill")
    due = 0
    for number in range(requests):
        answer = rig.client.generate(token_ids=ids(5 + number % 40), max_tokens=count, temperature=0, ignore_eos=True)
        due += answer.usage.prompt_tokens - answer.timing.prefill_cached_tokens
    rig.quiesce()  # a probe of two tokens, one of them from decode
    assert counted(rig, "baton_worker_steps_total", role="decode") - steps == requests * (count - 1) + 1
    assert 0 <= counted(rig, "baton_computed_prompt_tokens_total", role="prefill") - computed - due <= 2


@pytest.mark.parametrize("concurrency", [1, 16])
def test_kv_15_messages_of_a_request_are_few(cluster: Cluster, concurrency: int) -> None:
    rig = cluster.rig
    rig.quiesce()
    messages = Messages(kv_link(cluster))
    with ThreadPoolExecutor(concurrency) as pool:
        fields: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answers = list(pool.map(lambda _: rig.client.generate(token_ids=ids(80), **fields), range(16)))
    assert {answer.timing.kv_bytes for answer in answers} == {80 * 2 * 2 * 2 * 16 * 4}
    assert min(answer.timing.kv_frames for answer in answers) > 0
    assert messages.count / 16 >= 4  # announced, accepted, sent, acknowledged: once for any number of frames
    assert messages.count / 16 <= 100
