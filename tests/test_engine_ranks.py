"""The leader's channel and the collectives, among real processes."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton.engine.channel import FollowerChannel, LeaderChannel, RankLost, _introduce
from baton.engine.ranks import SingleRank
from baton.tests.harness.ranks import HOST, SECRET, TIMEOUT_S, Followers, followers, join

THIS = "baton.tests.test_engine_ranks"


def eventually(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Line:
    """A leader's channel, with what came in."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.messages: list[tuple[int, dict[str, Any]]] = []
        self.lost: list[RankLost] = []
        self.channel = LeaderChannel.bind(HOST, SECRET, timeout_s, self._keep, self.lost.append)

    def _keep(self, rank: int, message: dict[str, Any]) -> None:
        self.messages.append((rank, message))

    def accept(self, ranks: int) -> list[FollowerChannel]:
        found: dict[int, FollowerChannel] = {}

        def connect(rank: int) -> None:
            found[rank] = FollowerChannel.connect(self.channel.address, rank, SECRET, TIMEOUT_S)

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(1, ranks)]
        for thread in threads:
            thread.start()
        self.channel.accept(ranks, TIMEOUT_S)
        for thread in threads:
            thread.join()
        return [found[rank] for rank in sorted(found)]


def test_messages_go_both_ways_in_order() -> None:
    line = Line()
    ends = line.accept(3)
    for number in range(100):
        line.channel.broadcast({"kind": "plan", "number": number, "data": b"x" * number * 100})
    for end in ends:
        assert [end.receive()["number"] for _ in range(100)] == list(range(100))
    ends[0].send({"kind": "done", "leg": "a"})
    ends[1].send({"kind": "done", "leg": "b"})
    eventually(lambda: len(line.messages) == 2)
    assert sorted(rank for rank, _ in line.messages) == [1, 2]
    line.channel.close()
    for end in ends:
        for _ in range(2):
            with pytest.raises(RankLost):
                end.receive()
        end.close()
    assert line.lost == []


def test_a_lost_follower_is_reported_once_and_ends_the_line() -> None:
    line = Line()
    first, second = line.accept(3)
    first.close()
    eventually(lambda: line.lost)
    with pytest.raises(RankLost, match="rank 1"):
        line.channel.broadcast({"kind": "plan"})
    second.close()
    time.sleep(0.05)
    assert len(line.lost) == 1
    line.channel.close()


def test_the_store_is_replicated_to_every_rank() -> None:
    line = Line()
    ends = line.accept(4)
    ends[1].store.set("a", b"1")
    line.channel.store.set("b", b"2")
    for store in (line.channel.store, *(end.store for end in ends)):
        assert (store.get("a"), store.get("b")) == (b"1", b"2")
    assert line.messages == []
    line.channel.close()
    for end in ends:
        with pytest.raises(RankLost):
            end.receive()
        with pytest.raises(ConnectionError):
            end.store.get("never")
        end.close()


def test_strangers_are_refused_and_do_not_keep_ranks_out() -> None:
    line = Line()
    host, _, port = line.channel.address.rpartition(":")
    silent = socket.create_connection((host, int(port)))
    rude = socket.create_connection((host, int(port)))
    rude.sendall(b"\x80\x04\x95pickle" * 50)
    results: list[object] = []

    def wrong() -> None:
        try:
            FollowerChannel.connect(line.channel.address, 1, b"another secret", TIMEOUT_S)
        except RankLost as error:
            results.append(error)

    thread = threading.Thread(target=wrong)
    thread.start()
    (end,) = line.accept(2)
    thread.join()
    assert len(results) == 1
    assert line.messages == []
    end.close()
    line.channel.close()
    silent.close()
    rude.close()


def test_a_follower_refuses_a_leader_without_the_secret() -> None:
    with socket.create_server((HOST, 0)) as impostor:
        address = f"{HOST}:{impostor.getsockname()[1]}"

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(1000)
                connection.sendall(b"m" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RankLost, match="the leader does not know the secret"):
            FollowerChannel.connect(address, 1, SECRET, TIMEOUT_S)
        thread.join()


def test_the_same_rank_twice_and_a_missing_rank() -> None:
    line = Line()
    threads = [threading.Thread(target=_try_connect, args=(line.channel.address, 1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(RankLost, match=r"rank\(s\) \[2\] did not come within 3 s"):
        line.channel.accept(3, 3.0)
    line.channel.close()
    for thread in threads:
        thread.join()


def _try_connect(address: str, rank: int) -> None:
    with contextlib.suppress(RankLost):
        FollowerChannel.connect(address, rank, SECRET, 20.0).close()


@pytest.mark.parametrize(
    "frame", [struct.pack("!I", 1 << 30), struct.pack("!I", 3) + b"\xc1\xc1\xc1", struct.pack("!I", 1) + b"\x90"]
)
def test_what_is_no_message_breaks_the_line(frame: bytes) -> None:
    line = Line()
    (end,) = line.accept(2)
    end._line._socket.sendall(frame)
    eventually(lambda: line.lost)
    assert line.messages == []
    end.close()
    line.channel.close()


def test_a_stalled_follower_holds_nobody_up_for_ever() -> None:
    line = Line(timeout_s=0.5)
    host, _, port = line.channel.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        thread = threading.Thread(target=_introduce, args=(silent, 1, SECRET, time.monotonic() + 20))
        thread.start()
        line.channel.accept(2, TIMEOUT_S)
        thread.join()
        started = time.monotonic()
        with pytest.raises(RankLost, match="rank 1"):
            _broadcast_for_ever(line.channel)
        assert time.monotonic() - started < 15
    line.channel.close()


def _broadcast_for_ever(channel: LeaderChannel) -> None:
    while True:
        channel.broadcast({"kind": "plan", "data": b"x" * (1 << 20)})


def rank_tensor(rank: int, dtype: torch.dtype, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(rank: str, size: str, address: str, ordered: str) -> None:
    """A follower's main: the same calls as the leader's, results reported."""
    channel, group = join(rank, size, address, ordered == "True")
    widths = [3, 1, 2][: group.size]
    for dtype in (torch.float32, torch.bfloat16):
        tensor = rank_tensor(group.rank, dtype)
        group.all_reduce(tensor)
        channel.send({"kind": "sum", "data": tensor.view(torch.uint8).numpy().tobytes()})
        empty = group.gather_columns(rank_tensor(group.rank, dtype)[:, : widths[group.rank]], widths)
        assert empty.shape == (0, 0)
        assert group.gather_columns(torch.empty(0, widths[group.rank], dtype=dtype), widths).shape == (0, 0)
    try:
        channel.receive()
    except RankLost:
        channel.close()


@pytest.mark.parametrize(
    ("size", "ordered"), [(2, True), (2, False), (3, True), pytest.param(3, False, marks=pytest.mark.slow)]
)
def test_collectives(size: int, ordered: bool) -> None:
    widths = [3, 1, 2][:size]
    with followers(f"{THIS}:collectives", size, str(ordered), ordered=ordered) as ranks:
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            parts = [rank_tensor(rank, dtype) for rank in range(size)]
            tensor = parts[0].clone()
            ranks.group.all_reduce(tensor)
            exact = sum((part.double() for part in parts), torch.zeros(5, 7, dtype=torch.float64))
            torch.testing.assert_close(tensor.double(), exact, rtol=0.01, atol=0.02 if number else 1e-6)
            if ordered:
                total = parts[0].float()
                for part in parts[1:]:
                    total += part
                assert torch.equal(tensor, total.to(dtype))
            gathered = ranks.group.gather_columns(parts[0][:, : widths[0]], widths)
            columns = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
            assert torch.equal(gathered, torch.cat(columns, dim=1))
            assert ranks.group.gather_columns(torch.empty(0, widths[0], dtype=dtype), widths).shape == (0, sum(widths))
            data = tensor.view(torch.uint8).numpy().tobytes()
            eventually(lambda number=number: len(ranks.messages) == (number + 1) * (size - 1))  # type: ignore[misc]
            assert all(message["data"] == data for _, message in ranks.messages[number * (size - 1) :])
        with pytest.raises(ValueError, match="widths"):
            ranks.group.gather_columns(torch.empty(2, 9), widths)
    assert ranks.lost == []


def idle(rank: str, size: str, address: str) -> None:
    """A follower's main: joins, and does nothing until the leader goes."""
    channel, _group = join(rank, size, address)
    try:
        channel.receive()
    except RankLost:
        channel.close()


def _kill_one(ranks: Followers) -> None:
    ranks.processes[0].send_signal(signal.SIGKILL)
    eventually(lambda: ranks.lost)


def test_cf_07_a_killed_rank_fails_the_collectives_at_once() -> None:
    with followers(f"{THIS}:idle", 2) as ranks:
        _kill_one(ranks)
        started = time.monotonic()
        with pytest.raises(RankLost, match="rank 0 of 2"):
            ranks.group.all_reduce(torch.ones(4))
        assert time.monotonic() - started < 15
        with pytest.raises(RankLost):
            ranks.group.gather_columns(torch.ones(4, 1), [1, 1])


def test_cf_07_a_rank_that_does_not_come_fails_the_collective_at_the_limit() -> None:
    with followers(f"{THIS}:idle", 2, limit_s=3.0) as ranks:
        started = time.monotonic()
        with pytest.raises(RankLost, match="rank 0 of 2"):
            ranks.group.all_reduce(torch.ones(4))
        assert 2 < time.monotonic() - started < 20
        assert not ranks.lost


def test_cf_07_a_short_stop_does_no_harm() -> None:
    with followers(f"{THIS}:collectives", 2, "True") as ranks:
        ranks.processes[0].send_signal(signal.SIGSTOP)
        timer = threading.Timer(1.0, ranks.processes[0].send_signal, (signal.SIGCONT,))
        timer.start()
        for dtype in (torch.float32, torch.bfloat16):
            ranks.group.all_reduce(torch.ones(5, 7, dtype=dtype))
            ranks.group.gather_columns(torch.ones(5, 3, dtype=dtype), [3, 1])
        timer.join()
        assert not ranks.lost


def test_a_single_rank_has_nothing_to_do() -> None:
    group, tensor = SingleRank(), torch.ones(2, 3)
    group.all_reduce(tensor)
    assert group.gather_columns(tensor, [3]) is tensor
    assert (group.rank, group.size) == (0, 1)
