"""The NCCL side of a process group's carrier: an operation that never ends is aborted from another thread."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch
from baton.kv_transfer.carriers import RING, CarrierFailed
from baton.kv_transfer.torch_carrier import TorchCarrier
from baton.kv_transfer.watchdog import Watchdog
from baton.kv_transfer.wire import Wire
from baton.tests.harness.holdings import threads


class _Hanging:
    """A group whose operations end only when it is aborted, as NCCL's do when the peer is gone."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.begun = threading.Event()
        self.aborts = 0

    def rank(self) -> int:
        return 0

    def send(self, tensors: list[torch.Tensor], to_rank: int, tag: int) -> Any:
        return self

    recv = send

    def is_completed(self) -> bool:
        return self.aborted.is_set()

    def wait(self, limit: Any) -> None:
        self.begun.set()
        assert self.aborted.wait(60)
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()


@pytest.mark.parametrize("operation", ["send", "receive"])
@pytest.mark.parametrize("why", ["the peer is gone", "it takes too long"])
def test_an_operation_that_hangs_is_aborted(operation: str, why: str) -> None:
    others = threads("kv-watchdog")
    tcp = socket.create_server(("127.0.0.1", 0))
    with tcp, socket.create_connection(tcp.getsockname()) as near, tcp.accept()[0] as far:
        wire, group = Wire(near, 5.0), _Hanging()
        watchdog = Watchdog(group.abort, wire.peer_gone)
        limit_s = 30.0 if why == "the peer is gone" else 0.2
        carrier = TorchCarrier("gloo", group, limit_s, watchdog)  # type: ignore[arg-type]
        failures: list[Exception] = []

        def use() -> None:
            try:
                if operation == "send":
                    for _ in range(RING + 1):  # all buffers are on their way, and then one is waited for
                        carrier.send(carrier.buffer(8))
                else:
                    carrier.expect(8)
                    carrier.receive(8)
            except CarrierFailed as error:
                failures.append(error)

        began = time.monotonic()
        user = threading.Thread(target=use)
        user.start()
        assert group.begun.wait(10)
        if why == "the peer is gone":
            far.close()
        user.join(10)
        assert time.monotonic() - began < 10
        assert len(failures) == 1
        assert watchdog.reason == why
        carrier.close()
        assert not threads("kv-watchdog") - others


def test_operations_that_end_are_left_alone_and_the_thread_ends_with_the_carrier() -> None:
    others = threads("kv-watchdog")
    aborts: list[int] = []
    watchdog = Watchdog(lambda: aborts.append(1), lambda: True)
    time.sleep(0.12)  # it looks at the peer during operations only
    assert not aborts
    watchdog.close()
    calm = Watchdog(lambda: aborts.append(1), lambda: False)
    for _ in range(100):
        with calm.watching(10.0):
            pass
    calm.close()
    calm.close()
    assert not aborts
    assert calm.reason == ""
    assert not threads("kv-watchdog") - others
