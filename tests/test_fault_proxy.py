"""The fault proxy does what its name promises: each fault as the ends of a connection see it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from baton.tests.harness.fault_proxy import FaultProxy, Tunnel, fault_proxy

DIALLER = """
import os, sys
from baton.proto.failpoints import dial
host, port = sys.argv[1].split(":")
with dial("kv.dial", (host, int(port)), 5.0) as link:
    link.sendall(b"hello")
    print(link.recv(5).decode())
"""


def _wait(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Pair:
    """Both ends of a tunnel, each a connected socket."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.near = socket.create_connection(_split(proxy.address), 5)
            self.near.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % listener.getsockname()[1])
            self.far, _ = listener.accept()
        self.far.settimeout(20)
        assert self.near.recv(100) == b"HTTP/1.1 200 OK\r\n\r\n"
        _wait(lambda: proxy.tunnels)

    @property
    def tunnel(self) -> Tunnel:
        return self.proxy.tunnels[-1]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with fault_proxy() as proxy:
        pair = Pair(proxy)
        yield pair
        pair.near.close()
        pair.far.close()


def test_bytes_pass_both_ways_and_are_counted(pair: Pair) -> None:
    pair.near.sendall(b"question")
    assert pair.far.recv(100) == b"question"
    pair.far.sendall(b"answer")
    assert pair.near.recv(100) == b"answer"
    assert pair.tunnel.moved == {"up": 8, "down": 6}
    here = os.getpid()
    assert pair.tunnel.source_port == pair.near.getsockname()[1]
    assert pair.proxy.between(here, here) == []  # the listener of the far end is closed


def test_half_open_loses_one_direction_and_keeps_the_connection(pair: Pair) -> None:
    pair.tunnel.faults["up"].swallow = True
    pair.near.sendall(b"lost")
    pair.far.sendall(b"heard")
    assert pair.near.recv(100) == b"heard"
    _wait(lambda: pair.tunnel.moved["up"] == 4)
    pair.far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        pair.far.recv(1)
    pair.tunnel.faults["up"].swallow = False
    pair.near.sendall(b"again")
    pair.far.settimeout(20)
    assert pair.far.recv(100) == b"again"


def test_a_stalled_direction_delivers_later(pair: Pair) -> None:
    pair.tunnel.faults["up"].stall = True
    pair.near.sendall(b"a")  # the read that was in progress may still pass
    with contextlib.suppress(TimeoutError):
        pair.far.settimeout(1.0)
        pair.far.recv(1)
    pair.far.settimeout(0.2)
    pair.near.sendall(b"b")
    with pytest.raises(TimeoutError):
        pair.far.recv(1)
    pair.tunnel.faults["up"].stall = False
    pair.far.settimeout(20)
    got = b""
    while not got.endswith(b"b"):
        got += pair.far.recv(1)


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_is_a_reset_or_an_end(pair: Pair, reset: bool) -> None:
    pair.tunnel.cut(reset)
    for end in (pair.near, pair.far):
        end.settimeout(20)
        if reset:
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        else:
            assert end.recv(1) == b""
    _wait(lambda: not pair.tunnel.open)


def test_a_cut_in_mid_stream(pair: Pair) -> None:
    pair.tunnel.faults["up"].cut_in = 3
    pair.near.sendall(b"abcdef")
    got = b""
    with contextlib.suppress(ConnectionResetError):
        got = pair.far.recv(100)
        pair.far.recv(1)
    assert got in (b"abc", b"")  # a reset may overtake what the receiver has not read


def test_one_byte_is_damaged(pair: Pair) -> None:
    pair.tunnel.faults["down"].corrupt_in = 5
    pair.far.sendall(b"abc")
    assert pair.near.recv(3) == b"abc"
    pair.far.sendall(b"defgh")
    assert pair.near.recv(100) == b"deggh"  # "f" is the sixth, and loses its lowest bit
    pair.far.sendall(b"f")
    assert pair.near.recv(1) == b"f"


def test_latency_bandwidth_and_slow_close(pair: Pair) -> None:
    pair.tunnel.faults["up"].latency_s = 0.1
    pair.tunnel.faults["up"].bytes_per_s = 1000.0
    pair.tunnel.faults["up"].close_delay_s = 0.2
    began = time.monotonic()
    pair.near.sendall(bytes(100))
    assert pair.far.recv(100) == bytes(100)
    assert time.monotonic() - began >= 0.2
    began = time.monotonic()
    pair.near.shutdown(socket.SHUT_WR)
    assert pair.far.recv(1) == b""
    assert time.monotonic() - began >= 0.2


def test_a_black_hole_accepts_and_says_nothing() -> None:
    with fault_proxy() as proxy:
        proxy.blackhole = True
        with socket.create_connection(_split(proxy.address), 5) as link:
            link.sendall(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")
            link.settimeout(0.1)
            with pytest.raises(TimeoutError):
                link.recv(1)


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    with fault_proxy() as proxy, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening
        with socket.create_connection(_split(proxy.address), 5) as link:
            link.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % taken.getsockname()[1])
            assert link.recv(1) == b""


def test_a_process_dials_through_it_and_is_found_by_its_pid() -> None:
    with fault_proxy() as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = {**os.environ, "BATON_FAILPOINTS": f"kv.dial=via({proxy.address})"}
        command = [sys.executable, "-c", DIALLER, address]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as dialler:
            far, _ = listener.accept()
            with far:
                assert far.recv(5) == b"hello"
                (tunnel,) = proxy.between(dialler.pid, os.getpid())
                assert tunnel.moved["up"] == 5
                far.sendall(b"there")
                assert dialler.communicate(timeout=20)[0] == "there\n"
