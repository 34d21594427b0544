"""Process groups over a replicated store: rendezvous, collectives, failures, and what they listen on."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
from baton.kernels.process_group import ReplicatedStore, interface_of, make_group
from baton.tests.harness.holdings import descriptors


def _stores(size: int, timeout_s: float = 30.0) -> list[ReplicatedStore]:
    """Replicas joined in memory; publishing reaches all others."""
    stores: list[ReplicatedStore] = []

    def publisher(rank: int) -> Callable[[str, bytes], None]:
        def publish(key: str, value: bytes) -> None:
            for other, store in enumerate(stores):
                if other != rank:
                    store.deliver(key, value)

        return publish

    stores.extend(ReplicatedStore(publisher(rank), timeout_s) for rank in range(size))
    return stores


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_collectives_and_pairs(size: int) -> None:
    stores = _stores(size)

    def rank_main(rank: int) -> tuple[float, list[int]]:
        group = make_group("gloo", stores[rank], rank, size, 30.0, "127.0.0.1")
        total = torch.full((3,), float(rank + 1))
        group.allreduce([total]).wait()
        box = torch.full((4,), rank, dtype=torch.uint8)
        if size > 1 and rank == 0:
            group.send([box], 1, 0).wait()
        if size > 1 and rank == 1:
            group.recv([box], 0, 0).wait()
        return float(total[0]), box.tolist()

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank_main, range(size)))
    assert [total for total, _ in results] == [size * (size + 1) / 2] * size
    if size > 1:
        assert results[1][1] == [0, 0, 0, 0]


def test_listens_on_the_given_host_only() -> None:
    before = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    stores = _stores(2)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda r: make_group("gloo", stores[r], r, 2, 30.0, "127.0.0.1"), range(2)))
    after = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {address.ip for address in after - before} <= {"127.0.0.1"}
    assert len(groups) == 2


def test_strangers_leave_no_descriptor_behind() -> None:
    process = psutil.Process()
    known = {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    stores = _stores(2)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda r: make_group("gloo", stores[r], r, 2, 30.0, "127.0.0.1"), range(2)))
    listening = {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN} - known
    assert len(listening) == 2
    before = descriptors()
    for address in listening:
        for _ in range(5):
            with pytest.raises(OSError), socket.create_connection((address.ip, address.port), timeout=0.05):
                pass
    assert descriptors() <= before
    totals = [torch.ones(2), torch.ones(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: groups[r].allreduce([totals[r]]).wait(), range(2)))
    assert [total.tolist() for total in totals] == [[2.0, 2.0]] * 2


def test_other_threads_connections_are_left_alone() -> None:
    """Groups are built while other threads open and close listeners: nobody else's packets are dropped."""
    stop = threading.Event()

    def converse() -> int:
        count = 0
        while not stop.is_set():
            with (
                socket.create_server(("127.0.0.1", 0)) as listener,
                socket.create_connection(listener.getsockname()[:2], timeout=2) as one,
                listener.accept()[0] as other,
            ):
                other.settimeout(2)
                one.sendall(b"x")
                assert other.recv(1) == b"x"
            count += 1
        return count

    def build(_: int) -> None:
        stores = _stores(2)
        with ThreadPoolExecutor(2) as pair:
            groups = list(pair.map(lambda r: make_group("gloo", stores[r], r, 2, 20.0, "127.0.0.1"), range(2)))
        for group in groups:  # not before both have connected: one that is aborted hangs up on the other
            group.abort()

    with ThreadPoolExecutor(4) as pool:
        talks = [pool.submit(converse) for _ in range(2)]
        try:
            list(ThreadPoolExecutor(2).map(build, range(40)))
        finally:
            stop.set()
        assert all(talk.result() > 0 for talk in talks)


def test_the_store_lives_as_long_as_its_group() -> None:
    stores = _stores(1)
    group = make_group("gloo", stores[0], 0, 1, 5.0, "127.0.0.1")
    store = stores.pop()
    del store
    gc.collect()
    total = torch.ones(2)
    group.allreduce([total]).wait()
    assert total.tolist() == [1.0, 1.0]


def test_a_missing_peer_ends_the_rendezvous_at_the_limit() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="0/1"):
        make_group("gloo", ReplicatedStore(lambda key, value: None, 0.3), 0, 2, 0.3, "127.0.0.1")
    assert time.monotonic() - began < 15


def test_a_broken_channel_ends_the_rendezvous_at_once() -> None:
    store = ReplicatedStore(lambda key, value: None, 30.0)
    timer = threading.Timer(0.1, store.fail, ["peer left"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="peer left"):
        store.get("never")
    assert time.monotonic() - began < 15
    timer.join()


def test_store_reads_wait_and_time_out() -> None:
    one, two = _stores(2, timeout_s=0.2)
    threading.Timer(0.05, one.set, ["key", b"value"]).start()
    assert two.get("key") == b"value"
    assert two.check(["key"])
    assert not two.check(["key", "other"])
    assert two.multi_get(["key"]) == [b"value"]
    with pytest.raises(TimeoutError, match="other"):
        two.wait(["other"], timedelta(seconds=0.05))
    with pytest.raises(NotImplementedError, match="counters"):
        two.add("n", 1)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown process group backend 'mpi'"):
        make_group("mpi", ReplicatedStore(lambda k, v: None, 1.0), 0, 1, 1.0, "127.0.0.1")
    with pytest.raises(ValueError, match="not an address of this machine"):
        interface_of("192.0.2.7")
    assert interface_of(socket.gethostbyname("localhost"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="NCCL"):
            make_group("nccl", ReplicatedStore(lambda k, v: None, 1.0), 0, 1, 1.0, "127.0.0.1")
