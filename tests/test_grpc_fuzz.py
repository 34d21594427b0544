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
from baton.tests.harness.oracles import scrape, total
from baton.tests.harness.tiny_model import write_tiny_model
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

UNARY, BOTH = (False, False), (True, True)
ASK = api.GenerateRequest(prompt="hello", max_tokens=4, temperature=0.7)
TURN = api.Message(role="user", content="hi")
TEXT = oip.ModelInferRequest.InferInputTensor(
    name="text_input", datatype="BYTES", shape=[1], contents=oip.InferTensorContents(bytes_contents=[b"hello"])
)
INFER = oip.ModelInferRequest(
    model_name="tiny", inputs=[TEXT], parameters={"max_tokens": oip.InferParameter(int64_param=3)}
)
ENGINE_ASK = vllm.GenerateRequest(
    request_id="a",
    tokenized=vllm.TokenizedInput(input_ids=[40, 41, 42, 43, 44]),
    sampling_params=vllm.SamplingParams(max_tokens=4),
    stream=True,
)
GENERATE = Method("/baton.v1.Baton/Generate", ASK)
FRONT = [
    GENERATE,
    GENERATE,
    Method("/baton.v1.Baton/Chat", api.ChatRequest(messages=[TURN], parameters=api.GenerateRequest(max_tokens=3))),
    Method("/baton.v1.Baton/GenerateBatch", api.GenerateBatchRequest(requests=[ASK, ASK, ASK], parallelism=2)),
    Method("/baton.v1.Baton/Tokenize", api.TokenizeRequest(prompt="hello"), UNARY),
    Method("/baton.v1.Baton/Detokenize", api.DetokenizeRequest(token_ids=[40, 41]), UNARY),
    Method("/baton.v1.Baton/ListModels", api.ListModelsRequest(), UNARY),
    Method("/inference.GRPCInferenceService/ModelInfer", INFER, UNARY),
    Method("/inference.GRPCInferenceService/ModelStreamInfer", INFER, BOTH),
    Method("/inference.GRPCInferenceService/ModelMetadata", oip.ModelMetadataRequest(name="tiny"), UNARY),
]
ENGINE = [
    Method("/vllm.grpc.engine.VllmEngine/Generate", ENGINE_ASK),
    Method("/vllm.grpc.engine.VllmEngine/Generate", ENGINE_ASK),
    Method("/vllm.grpc.engine.VllmEngine/Abort", vllm.AbortRequest(request_ids=["a"]), UNARY),
    Method("/vllm.grpc.engine.VllmEngine/GetLoads", vllm.GetLoadsRequest(), UNARY),
    Method("/vllm.grpc.engine.VllmEngine/GetServerInfo", vllm.GetServerInfoRequest(), UNARY),
    Method("/vllm.grpc.engine.VllmEngine/Embed", vllm.EmbedRequest(), UNARY),
    Method("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
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
    for method in (*FRONT, *ENGINE):  # the good ones get through
        unserved = method.path.endswith(("/Embed", "/SubscribeKvEvents"))
        assert total.statuses[method.path, "UNIMPLEMENTED" if unserved else "OK"], total.statuses
    assert sum(count for (_, status), count in total.statuses.items() if status == "INVALID_ARGUMENT") > calls / 20
    rig.quiesce()


def _allowed(status: str) -> bool:
    return status not in {"INTERNAL", "UNKNOWN", "HANGS", "DATA_LOSS", "UNAVAILABLE"}


async def test_400_calls(rig: rigs.Rig) -> None:
    await fuzz_all(rig, 400, 1)
    counted = scrape(rig.http)
    for router in ("router", "prefill-0", "decode-0"):  # one scrape has what gateways' ports counted too
        assert total(counted, "baton_requests_accepted_total", router=router) > 0, router


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_10_000_calls(rig: rigs.Rig) -> None:
    await fuzz_all(rig, 10_000, 2)
