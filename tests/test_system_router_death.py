"""Two router processes on one port, and one of them killed while both serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from baton.tests.harness.client import Client, Stream, expect_status
from baton.tests.harness.gates import Gates
from baton.tests.harness.one_pair import until
from baton.tests.harness.oracles import Reference, check_pool, scrape, total
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import EOS, special_id

EACH, TOKENS = 3, 150  # streams of each router
_BLOCKS = 2 * EACH * 64  # of 2 KiB: room for all of them at their longest
CHANGES = {"router.processes": 2, "pools.prefill.memory": _BLOCKS * 2048, "pools.decode.memory": _BLOCKS * 2048}


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates", {"decode.step": "sleep(0.3)?"})  # long enough to see what runs


@pytest.fixture
def rig(tmp_path: Path, tiny_dir: Path, gates: Gates) -> Iterator[Rig]:
    config = merged(tiny_config(tiny_dir), CHANGES)
    with running(tmp_path / "cluster", config, gates, checks=False) as rig:
        yield rig


def _both_ready(rig: Rig) -> bool:
    """Each new connection may have either router, once both listen: many of them, so that both are asked."""
    port, pids = int(rig.http.rpartition(":")[2]), rig.router_pids()
    if len(pids) != 2 or not all(_connections(pid, port, psutil.CONN_LISTEN) for pid in pids):
        return False
    try:
        return all(httpx.get(f"{rig.http}/ready", timeout=30).status_code == 200 for _ in range(12))
    except httpx.HTTPError:
        return False


def _connections(pid: int, port: int, status: str = psutil.CONN_ESTABLISHED) -> set[int]:
    """The clients' ports of those to `port` that a router holds; 0 is that of a listener."""
    found = psutil.Process(pid).net_connections("tcp")
    return {c.raddr.port if c.raddr else 0 for c in found if c.status == status and c.laddr.port == port}


def _clients(rig: Rig, each: int, stack: ExitStack) -> dict[int, list[Client]]:
    """So many of each router process, by its pid: the kernel says which one has a connection."""
    port, pids = int(rig.grpc.rpartition(":")[2]), rig.router_pids()
    known = {pid: _connections(pid, port) for pid in pids}
    clients: dict[int, list[Client]] = {pid: [] for pid in pids}
    while any(len(ours) < each for ours in clients.values()):
        client = stack.enter_context(closing(Client(rig.grpc)))
        client.models()
        (owner,) = [pid for pid in pids if _connections(pid, port) - known[pid]]
        known[owner] = _connections(owner, port)
        clients[owner].append(client)
    return {pid: ours[:each] for pid, ours in clients.items()}


def _in_batch(rig: Rig) -> float:
    return total(scrape(rig.http), "baton_worker_running", role="decode")


def _prompt(number: int) -> list[int]:
    return [(number * 31 + i * i * 7 + i) % 256 for i in range(8)]


def _begun(clients: list[Client], start: int) -> dict[int, Stream]:
    """Streams that have said something, by the numbers of their prompts."""
    fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    streams = {start + i: client.stream(token_ids=_prompt(start + i), **fields) for i, client in enumerate(clients)}
    for stream in streams.values():
        stream.until_tokens(3)
    return streams


def test_a_killed_router_takes_its_own_requests_and_nothing_else(rig: Rig, gates: Gates, tiny_dir: Path) -> None:
    reference = Reference(tiny_dir, frozenset({special_id(EOS)}))
    with ExitStack() as stack:
        until(lambda: _both_ready(rig), "the routers are not ready")
        killed, other = rig.router_pids()
        clients = _clients(rig, EACH, stack)
        gates.close("decode.step")
        lost, kept = _begun(clients[killed], 0), _begun(clients[other], EACH)
        until(lambda: _in_batch(rig) == 2 * EACH, "not all are in the batch")
        victim = psutil.Process(killed)
        victim.kill()
        victim.wait(30)
        until(lambda: _in_batch(rig) == EACH, "its legs are still there, or others are gone")
        gates.release("decode.step")
        for number, stream in lost.items():
            with expect_status() as status:
                stream.rest()
            assert status[0][0] == grpc.StatusCode.UNAVAILABLE
            assert not stream.answer.choices[0].reason  # nothing looks finished
            said = stream.answer.token_ids
            reference.check(_prompt(number), said, len(said), stops=False)
        for number, stream in kept.items():
            reference.check(_prompt(number), stream.rest().token_ids, TOKENS, stops=False)
        until(lambda: _both_ready(rig), "the routers are not ready")
        assert other in rig.router_pids()
        for number, ours in enumerate(_clients(rig, 1, stack).values()):  # the new process serves too
            answer = ours[0].generate(token_ids=_prompt(number), max_tokens=9, temperature=0, ignore_eos=True)
            reference.check(_prompt(number), answer.token_ids, 9, stops=False)
        for _ in range(8):  # whichever router answers
            check_pool(rig.http)
