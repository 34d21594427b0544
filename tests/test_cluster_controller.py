"""The controller on fake workers that speak the real protocol: start, self-test, death, restart, drain, scale."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from baton.cluster import config_load, spec, yaml_tree
from baton.cluster.control_service import ControlService
from baton.cluster.controller import Controller, ControllerSettings
from baton.cluster.failures import AddressTaken, Refused, StartFailed
from baton.cluster.reconcile import Backoff
from baton.proto import control_pb2 as pb
from baton.proto.control_pb2_grpc import AdminStub, MembershipStub
from baton.proto.errors import ConfigError
from baton.tests.harness.fake_cluster import FakeCluster, FakeSlot


def controller(cluster: FakeCluster, prefill: int = 1, decode: int = 1, ranks: int = 1) -> Controller[FakeSlot]:
    text = f"model: {{path: m}}\npools: {{prefill: {{replicas: {prefill}}}, decode: {{replicas: {decode}}}}}"
    config = config_load.build(yaml_tree.parse(text, "c"), Path())
    settings = ControllerSettings(
        ranks={"prefill": 1, "decode": ranks},
        devices={"prefill": "cpu", "decode": "cpu"},
        start_timeout_s=5.0,
        self_test_timeout_s=5.0,
        stop_grace_s=1.0,
        drain_timeout_s=5.0,
        heartbeat_s=0.05,
        backoff=Backoff(0.05, 1.0),
        tls=None,
    )
    build = spec.SpecBuilder(config).worker
    return Controller(settings, cluster, build, spec.wanted_workers(config), lambda worker, kind, fields: None)


@asynccontextmanager
async def opened(cluster: FakeCluster, **shape: int) -> AsyncIterator[Controller[FakeSlot]]:
    running = controller(cluster, **shape)
    try:
        async with asyncio.timeout(20):
            await running.open()
            yield running
    finally:
        await running.close()
        assert cluster.slots == set()


def states(running: Controller[FakeSlot]) -> dict[str, str]:
    return {key: member.state for key, member in running.feed.view.members.items()}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_every_pair_is_tested_before_it_counts_as_ready() -> None:
    cluster = FakeCluster()
    async with opened(cluster, prefill=2, decode=2) as running:
        assert set(states(running).values()) == {"ready"}
        assert sorted(cluster.tested) == [(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)]
        assert running.welcomes["decode-0"].total_blocks == 10
    assert all(rank.stopped == 1.0 for rank in cluster.ranks)


async def test_followers_start_with_the_leaders_address_and_secret() -> None:
    cluster = FakeCluster()
    async with opened(cluster, ranks=3):
        ranks = [rank.spec for rank in cluster.ranks if rank.spec.role == "decode"]
        assert [rank.rank for rank in ranks] == [0, 1, 2]
        assert {rank.leader for rank in ranks[1:]} == {"channel of decode-0"}
        assert len({rank.params.secret for rank in ranks}) == 1
        assert len({rank.params.incarnation for rank in ranks}) == 1


@pytest.mark.parametrize("victim", [0, 2])
async def test_the_death_of_any_rank_restarts_the_whole_worker_under_a_new_incarnation(victim: int) -> None:
    cluster = FakeCluster()
    async with opened(cluster, ranks=3) as running:
        first = running.feed.view.members["decode-0"]
        group = [rank for rank in cluster.ranks if rank.spec.role == "decode"]
        group[victim].die()
        await until(lambda: running.feed.view.members["decode-0"].state == "dead")
        await until(lambda: running.feed.view.members["decode-0"].state == "ready")
        second = running.feed.view.members["decode-0"]
        assert second.incarnation != first.incarnation
        assert (first.restarts, second.restarts) == (0, 1)
        assert all(rank.stopped is not None for rank in group)
        assert cluster.tested == [("prefill-0", "decode-0")] * 2
        assert states(running)["prefill-0"] == "ready"


async def test_a_failed_self_test_fails_the_start_and_says_which_pair() -> None:
    cluster = FakeCluster(broken={"prefill-0": "no route"})
    with pytest.raises(StartFailed, match="self-test prefill-0 -> decode-0: prefill-0: no route"):
        async with opened(cluster):
            pass


async def test_a_worker_that_dies_before_it_is_ready_fails_the_start_with_its_reason() -> None:
    cluster = FakeCluster(dead_on_arrival={"decode-0": "port 1 is taken"})
    with pytest.raises(StartFailed, match="decode-0: port 1 is taken"):
        async with opened(cluster):
            pass


async def test_a_placement_that_finds_no_room_fails_the_start() -> None:
    with pytest.raises(StartFailed, match="decode-0 needs 3, there is room for 2"):
        async with opened(FakeCluster(room=2), ranks=3):
            pass


async def test_a_worker_that_cannot_restart_is_tried_again_while_the_rest_serves() -> None:
    cluster = FakeCluster()
    async with opened(cluster, decode=2) as running:
        cluster.dead_on_arrival["decode-1"] = "out of memory"
        cluster.leader("decode-1").die()
        await until(lambda: running.feed.view.members["decode-1"].restarts >= 2)
        assert states(running)["decode-0"] == "ready"
        del cluster.dead_on_arrival["decode-1"]
        await until(lambda: states(running)["decode-1"] == "ready")


async def test_drain_waits_until_the_worker_is_idle_and_shrinks_the_pool() -> None:
    cluster = FakeCluster()
    async with opened(cluster, decode=2) as running:
        worker = cluster.leader("decode-1").worker
        assert worker is not None
        worker.busy = 1
        task = asyncio.create_task(running.drain("decode-1"))
        await until(lambda: states(running)["decode-1"] == "draining")
        await asyncio.sleep(0.3)
        assert not task.done()
        assert cluster.leader("decode-1").stopped is None
        worker.busy = 0
        assert await task == "decode-1 is drained and stopped; decode has 1 workers"
        assert states(running) == {"decode-0": "ready", "prefill-0": "ready"}
        with pytest.raises(Refused, match="the only ready decode worker"):
            await running.drain("decode-0")
        with pytest.raises(Refused, match="no worker decode-7"):
            await running.drain("decode-7")


async def test_scale_up_and_down() -> None:
    cluster = FakeCluster()
    async with opened(cluster) as running:
        assert running.scale("decode", 3) == "decode: 1 -> 3 workers (decode-0, decode-1, decode-2)"
        await until(lambda: list(states(running).values()).count("ready") == 4)
        running.scale("decode", 1)
        await until(lambda: states(running) == {"decode-0": "ready", "prefill-0": "ready"})
        with pytest.raises(Refused, match="at least 1"):
            running.scale("decode", 0)
        with pytest.raises(Refused, match="at most 1024"):
            running.scale("decode", 100_000)
        with pytest.raises(Refused, match="no pool 'x'"):
            running.scale("x", 1)


async def test_a_mistake_in_the_configuration_found_by_a_worker_stays_one() -> None:
    cluster = FakeCluster(dead_on_arrival={"decode-0": "model.path: bad"})
    original = cluster.start

    async def start(*arguments: object) -> object:
        rank = await original(*arguments)  # type: ignore[arg-type]
        rank.config_error = True
        return rank

    cluster.start = start  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match=r"model\.path: bad"):
        async with opened(cluster):
            pass


async def test_routers_get_the_view_and_every_change_and_people_their_answers() -> None:
    cluster = FakeCluster()
    async with opened(cluster, decode=2) as running:
        service = ControlService("127.0.0.1:0", running, "m", {"grpc": "127.0.0.1:1"})
        address = await service.start()
        async with grpc.aio.insecure_channel(address) as channel:
            watch = MembershipStub(channel).Watch(pb.WatchRequest(router_id="r"))
            first = await watch.read()
            assert [(m.worker_id, m.state) for m in first.members] == [
                ("decode-0", "ready"),
                ("decode-1", "ready"),
                ("prefill-0", "ready"),
            ]
            admin = AdminStub(channel)
            status = await admin.Status(pb.StatusRequest())
            assert (status.model, status.endpoints[0].name, status.view) == ("m", "grpc", first)
            drained = await admin.Drain(pb.DrainRequest(worker_id="decode-1"))
            assert "decode-1 is drained" in drained.message
            seen = [await watch.read()]
            while len(seen[-1].members) > 2:
                seen.append(await watch.read())
            assert [view.version for view in seen] == sorted({view.version for view in seen})
            for call, code in [
                (admin.Drain(pb.DrainRequest(worker_id="decode-0")), grpc.StatusCode.FAILED_PRECONDITION),
                (admin.Scale(pb.ScaleRequest(pool="decode", replicas=0)), grpc.StatusCode.INVALID_ARGUMENT),
                (admin.SetRole(pb.SetRoleRequest(worker_id="decode-0")), grpc.StatusCode.UNIMPLEMENTED),
            ]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == code
            watch.cancel()
        second = ControlService(address, running, "m", {})
        with pytest.raises(AddressTaken, match=rf"router\.admin: {address} is taken"):
            await second.start()
        await service.stop()
