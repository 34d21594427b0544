"""A fuzz of every gRPC method that clients reach, against a real cluster: no INTERNAL, no UNKNOWN, no call that hangs,
no block that stays behind (the rig checks its pools), and the cluster answers afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from baton.proto import baton_pb2 as api
from baton.proto import open_inference_pb2 as oip
from baton.tests.harness import rig as rigs
from baton.tests.harness.grpc_fuzz import Method, Outcome, fuzz
from baton.tests.harness.tiny_model import write_tiny_model
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

UNARY, BOTH = (False, False), (True, True)
FRONT = [
    Method("/baton.v1.Baton/Generate", api.GenerateRequest),
    Method("/baton.v1.Baton/Generate", api.GenerateRequest),
    Method("/baton.v1.Baton/Chat", api.ChatRequest),
    Method("/baton.v1.Baton/GenerateBatch", api.GenerateBatchRequest),
    Method("/baton.v1.Baton/Tokenize", api.TokenizeRequest, UNARY),
    Method("/baton.v1.Baton/Detokenize", api.DetokenizeRequest, UNARY),
    Method("/baton.v1.Baton/ListModels", api.ListModelsRequest, UNARY),
    Method("/inference.GRPCInferenceService/ModelInfer", oip.ModelInferRequest, UNARY),
    Method("/inference.GRPCInferenceService/ModelStreamInfer", oip.ModelInferRequest, BOTH),
    Method("/inference.GRPCInferenceService/ModelMetadata", oip.ModelMetadataRequest, UNARY),
]
ENGINE = [
    Method("/vllm.grpc.engine.VllmEngine/Generate", vllm.GenerateRequest),
    Method("/vllm.grpc.engine.VllmEngine/Generate", vllm.GenerateRequest),
    Method("/vllm.grpc.engine.VllmEngine/Abort", vllm.AbortRequest, UNARY),
    Method("/vllm.grpc.engine.VllmEngine/GetLoads", vllm.GetLoadsRequest, UNARY),
    Method("/vllm.grpc.engine.VllmEngine/GetServerInfo", vllm.GetServerInfoRequest, UNARY),
    Method("/vllm.grpc.engine.VllmEngine/Embed", vllm.EmbedRequest, UNARY),
    Method("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rigs.Rig]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    model = write_tiny_model(folder / "tiny")
    changes = {"pools.prefill.vllm_grpc": "127.0.0.1:0", "pools.decode.vllm_grpc": "127.0.0.1:0"}
    with rigs.running(folder, rigs.merged(rigs.tiny_config(model), changes)) as rig:
        yield rig


async def fuzz_all(rig: rigs.Rig, calls: int, seed: int) -> None:
    """Three quarters of the calls to the router, the rest to the workers."""
    workers = re.findall(r"vllm.grpc.engine at (\S+)", rig.output)
    assert len(workers) == 2
    total = Outcome()
    for address, methods, share in ((rig.grpc, FRONT, 0.75), *((worker, ENGINE, 0.125) for worker in workers)):
        async with grpc.aio.insecure_channel(address) as channel:
            found = await fuzz(channel, methods, int(calls * share), seed, allowed=_allowed)
        total.statuses += found.statuses
        total.bad += found.bad
    print(sorted(total.statuses.items()))
    assert total.bad == []
    assert {"OK", "INVALID_ARGUMENT"} <= {status for _, status in total.statuses}
    rig.quiesce()


def _allowed(status: str) -> bool:
    return status not in {"INTERNAL", "UNKNOWN", "HANGS", "DATA_LOSS", "UNAVAILABLE"}


async def test_400_calls(rig: rigs.Rig) -> None:
    await fuzz_all(rig, 400, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_10_000_calls(rig: rigs.Rig) -> None:
    await fuzz_all(rig, 10_000, 2)
