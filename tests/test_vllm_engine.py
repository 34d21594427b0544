"""Workers that speak vllm.grpc.engine: what a gateway in prefill/decode mode does, call by call, with a real cluster.

That KV really travelled is read from the decode worker's own counters: a dead way would give the right text too.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from baton.proto import baton_pb2 as api
from baton.proto.errors import InvalidRequest
from baton.router.life_messages import Peer
from baton.router.requests import ChoiceEnd, Chunk
from baton.tests.harness import oracles
from baton.tests.harness import rig as rigs
from baton.tests.harness.gates import Gates
from baton.tests.harness.one_pair import until
from baton.tests.harness.tiny_model import write_tiny_model
from baton.vllm_engine import handoff
from baton.vllm_engine.messages import Answers, client_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

PREFILL_LEG = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})
PROMPT = list(range(40, 61))


# ---- tickets and messages, without a cluster -------------------------------------------------------------------------


def test_a_ticket_names_who_has_the_prompt() -> None:
    peer = Peer("prefill-0", "abc")
    assert handoff.read(handoff.write(peer, 7)) == (False, peer)
    assert handoff.read(PREFILL_LEG) == (True, None)
    assert handoff.read("") == handoff.read("{}") == (False, None)
    assert handoff.read('{"do_remote_prefill": true, "remote_engine_id": null}') == (False, None)
    for bad in ("[]", "{", "[" * 50_000, '{"do_remote_prefill": true, "remote_engine_id": 1}', "x" * 70_000):
        with pytest.raises(InvalidRequest) as caught:
            handoff.read(bad)
        assert caught.value.field == "kv_transfer_params_json"


def test_zero_stands_for_the_neutral_value_where_absence_cannot_be_told() -> None:
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 2, 3]))
    asked = client_request(request, None, prefill_only=False)
    assert (asked.top_p, asked.top_k, asked.repetition_penalty, asked.n) == (None, None, None, None)
    assert (asked.temperature, asked.max_tokens, asked.seed, asked.logprobs) == (None, None, None, None)
    request.sampling_params.MergeFrom(vllm.SamplingParams(temperature=0, max_tokens=0, seed=-1, n=3, min_tokens=2))
    asked = client_request(request, 1.0, prefill_only=False)
    assert (asked.temperature, asked.max_tokens, asked.seed, asked.n) == (0, 0, 2**64 - 1, 3)
    half = client_request(request, 1.0, prefill_only=True)
    assert (half.max_tokens, half.n, half.min_tokens) == (1, 1, 0)  # ST-04: user lengths do not reach the prefill leg
    request.sampling_params.truncate_prompt_tokens = 2
    assert client_request(request, None, prefill_only=False).token_ids == [2, 3]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs"),
        ({"kv_transfer_params": vllm.KvTransferParams(remote_port=1)}, "kv_transfer_params"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling_params": vllm.SamplingParams(structural_tag="{}")}, "sampling_params.structural_tag"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client_request(vllm.GenerateRequest(text="x", **fields), None, prefill_only=False)
    assert caught.value.field == name


def test_matched_stops_and_aborts_are_told_apart() -> None:
    request = vllm.GenerateRequest(stream=True, sampling_params=vllm.SamplingParams(stop_token_ids=[9]))
    answers = Answers(request, 3, 3, "")
    answers.chunk(Chunk(0, 0, [8, 9], "", []))
    answers.chunk(Chunk(1, 0, [8], "", []))
    by_id = answers.end(ChoiceEnd(0, "stop", "", None, None)).complete
    by_text = answers.end(ChoiceEnd(1, "stop", "END", None, None)).complete
    assert (by_id.WhichOneof("matched_stop"), by_id.matched_token_id) == ("matched_token_id", 9)
    assert by_text.matched_stop_str == "END"
    (left,) = [message.complete for message in answers.aborted()]
    assert (left.index, left.finish_reason) == (2, "abort")


# ---- with a cluster --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A cluster and the two stubs that a gateway has."""

    rig: rigs.Rig
    prefill: Any
    decode: Any
    address: str  # of decode
    gates: Gates


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    changes = {f"pools.{role}.vllm_grpc": "127.0.0.1:0" for role in ("prefill", "decode")}
    config = rigs.merged(rigs.tiny_config(write_tiny_model(folder / "model")), changes)
    gates = Gates(folder / "gates", {"decode.step": "gate"})
    with rigs.running(folder, config, gates) as rig:
        found = dict(re.findall(r"(\w+)-0: vllm.grpc.engine at (\S+)", rig.output))
        with grpc.insecure_channel(found["prefill"]) as one, grpc.insecure_channel(found["decode"]) as other:
            pair = Pair(rig, VllmEngineStub(one), VllmEngineStub(other), found["decode"], gates)
            stubs = (pair.prefill, pair.decode)
            until(lambda: all(stub.HealthCheck(vllm.HealthCheckRequest()).healthy for stub in stubs), "not healthy")
            yield pair


def call(stub: Any, name: str, kv: str = "", *, stream: bool = True, ids: list[int] = PROMPT, **sampling: Any) -> Any:
    params = vllm.SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | sampling)
    request = vllm.GenerateRequest(
        request_id=name,
        tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=params,
        stream=stream,
        kv_transfer_params_json=kv or None,
    )
    return stub.Generate(request, timeout=30)


def ticket_of(pair: Pair, name: str, **more: Any) -> str:
    """What a gateway does first: the prefill leg, drained."""
    (answer,) = call(pair.prefill, name, PREFILL_LEG, stream=False, **more)
    assert len(answer.complete.output_ids) == 1
    return str(answer.complete.kv_transfer_params_json)


def active(pair: Pair) -> int:
    """Streams that decode serves."""
    return int(pair.decode.GetServerInfo(vllm.GetServerInfoRequest()).active_requests)


def mono(pair: Pair, ids: list[int] = PROMPT, **more: Any) -> list[int]:
    """The same answer over baton.v1."""
    fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True} | more
    return pair.rig.client.generate(token_ids=ids, **fields).token_ids


def test_prefill_and_decode_in_a_gateways_order(pair: Pair) -> None:
    ticket = ticket_of(pair, "r1", max_tokens=6, min_tokens=3, n=1)
    fields = json.loads(ticket)
    assert (fields["do_remote_prefill"], fields["remote_engine_id"]) == (True, "prefill-0")
    messages = list(call(pair.decode, "r1", ticket))
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    (complete,) = [message.complete for message in messages if message.HasField("complete")]
    said = [token for chunk in chunks for token in chunk.token_ids]
    assert said == list(complete.output_ids) == mono(pair)
    assert [chunk.completion_tokens for chunk in chunks][-1] == complete.completion_tokens == 6
    assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(PROMPT))
    assert complete.cached_tokens >= 20  # at P, which had computed it: five blocks of four


def test_the_kv_comes_from_the_ticket_and_is_not_computed_twice(pair: Pair) -> None:
    """P computes each full block once. Decode workers compute no prompts: what they go on with came over the link."""
    ids = [70 + i % 50 for i in range(33)]

    def computed() -> float:
        """As of now: an answer of P alone brings P's counters along. It adds two."""
        pair.rig.client.generate(token_ids=[1, 2], max_tokens=1)
        return oracles.total(pair.rig.metrics(), "baton_computed_prompt_tokens_total", worker="prefill-0")

    before = computed()
    ticket = ticket_of(pair, "r2", ids=ids)
    (complete,) = call(pair.decode, "r2", ticket, stream=False, ids=ids)
    assert complete.complete.cached_tokens == 32
    assert computed() - before == 33 + 1 + 2  # the last token's logits, for the second leg
    assert list(complete.complete.output_ids) == mono(pair, ids)


def test_decode_alone_takes_a_prefill_worker_by_itself(pair: Pair) -> None:
    """As with n > 1, which a gateway sends without a ticket."""
    messages = list(call(pair.decode, "r3", n=3, stream=False, seed=5, temperature=1.0))
    assert sorted(message.complete.index for message in messages) == [0, 1, 2]
    assert all(len(message.complete.output_ids) == 6 for message in messages)
    stale = handoff.write(Peer("prefill-0", "an older life"), 21)
    (complete,) = call(pair.decode, "r4", stale, stream=False)
    assert list(complete.complete.output_ids) == mono(pair)


def test_st_05_logprobs_of_every_token_the_first_included(pair: Pair) -> None:
    messages = list(call(pair.decode, "r5", ticket_of(pair, "r5"), logprobs=2))
    pieces = [message.chunk.output_logprobs for message in messages if message.HasField("chunk")]
    ids = [token for piece in pieces for token in piece.token_ids]
    values = [value for piece in pieces for value in piece.token_logprobs]
    theirs = pair.rig.client.generate(token_ids=PROMPT, temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    assert ids == theirs.token_ids
    assert values == pytest.approx([score.logprob for score in theirs.choices[0].logprobs], abs=1e-5)
    assert all(len(top.values) == 2 for piece in pieces for top in piece.top_logprobs)


def test_st_06_prompt_logprobs_in_the_first_message(pair: Pair) -> None:
    messages = list(call(pair.decode, "r8", ticket_of(pair, "r8"), prompt_logprobs=1))
    (scores,) = [m.chunk.input_logprobs for m in messages if m.HasField("chunk") and m.chunk.HasField("input_logprobs")]
    assert list(scores.token_ids) == PROMPT
    assert [value.HasField("value") for value in scores.token_logprobs] == [False] + [True] * (len(PROMPT) - 1)
    theirs = pair.rig.client.generate(token_ids=PROMPT, temperature=0, max_tokens=1, prompt_logprobs=1)
    expected = [score.logprob for score in theirs.prompt_logprobs]
    assert [value.value for value in scores.token_logprobs[1:]] == pytest.approx(expected, abs=1e-5)
    assert [len(top.values) for top in scores.top_logprobs] == [0] + [1] * (len(PROMPT) - 1)


def test_a_constraint_holds_over_the_seam(pair: Pair) -> None:
    """The first token is drawn by prefill, the others by decode."""
    answer = vllm.SamplingParams(
        temperature=1, max_tokens=9, seed=3, choice=vllm.ChoiceConstraint(choices=["yellow", "green"])
    )
    request = vllm.GenerateRequest(
        request_id="r9",
        tokenized=vllm.TokenizedInput(input_ids=PROMPT),
        sampling_params=answer,
        kv_transfer_params_json=ticket_of(pair, "r9"),
    )
    (message,) = pair.decode.Generate(request, timeout=30)
    words = {"yellow", "green"}
    assert pair.rig.client.detokenize(message.complete.output_ids) in words
    assert (
        pair.rig.client.generate(prompt="x", one_of=api.Choices(texts=["yellow", "green"]), max_tokens=9, seed=1).text
        in words
    )


def test_abort_ends_the_stream_and_frees_the_blocks(pair: Pair) -> None:
    """A gateway whose client left sends Abort and does not reset the stream."""
    pair.gates.close("decode.step")
    stream = call(pair.decode, "r6", ticket_of(pair, "r6"), max_tokens=80)
    next(stream)
    pair.gates.wait_reached("decode.step")
    pair.decode.Abort(vllm.AbortRequest(request_ids=["r6", "never heard of"]))
    last = list(stream)[-1].complete
    pair.gates.release("decode.step")
    assert last.finish_reason == "abort"
    assert last.completion_tokens < 80
    pair.rig.quiesce()
    pair.decode.Abort(vllm.AbortRequest(request_ids=["r6"]))  # once more is fine


def test_a_cancelled_call_frees_its_blocks_too(pair: Pair) -> None:
    pair.gates.close("decode.step")
    stream = call(pair.decode, "r7", ticket_of(pair, "r7"), max_tokens=80)
    next(stream)
    pair.gates.wait_reached("decode.step")
    stream.cancel()
    until(lambda: not active(pair), "the cancel is not noticed")
    pair.gates.release("decode.step")
    pair.rig.quiesce()


def test_api_10_the_calls_deadline_is_the_requests(pair: Pair) -> None:
    params = vllm.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1] * 20), sampling_params=params)
    pair.gates.close("decode.step")  # the answer cannot end before its deadline
    with pytest.raises(grpc.RpcError) as caught:
        list(pair.decode.Generate(request, timeout=0.5))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    pair.gates.release("decode.step")
    pair.rig.quiesce()


def test_bad_requests_are_refused_by_name(pair: Pair) -> None:
    for fields, words in (
        ({"ids": []}, "no tokens"),
        ({"ids": [1 << 20]}, "outside the vocabulary"),
        ({"ids": [1] * 5000}, "tokenized"),
        ({"max_tokens": 0}, "max_tokens"),  # ST-03
        ({"kv": "nonsense"}, "kv_transfer_params_json"),
        ({"logprobs": 21}, "logprobs"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(call(pair.decode, "bad", **fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(caught.value.details())


def reported(stub: Any) -> Any:
    """The worker's load, as of its last heartbeat."""
    (load,) = stub.GetLoads(vllm.GetLoadsRequest()).loads
    return load


def at_rest(stub: Any) -> bool:
    """Whether the last heartbeat knew of no request."""
    return not reported(stub).num_total_reqs


def test_what_a_gateway_asks_when_it_registers_a_worker(pair: Pair) -> None:
    for stub, role, kind in (
        (pair.prefill, "prefill", "kv_producer"),
        (pair.decode, "decode", "kv_consumer"),
    ):
        server = stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.server_type, server.kv_connector) == ("vllm-grpc", "NixlConnector")
        assert (server.kv_role, server.kv_engine_id, server.block_size) == (kind, f"{role}-0", 4)
        assert server.max_num_seqs > 0
        model = stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (model.is_generation, model.model_type) == (True, "llama")
        assert model.max_context_length > len(PROMPT)
        assert model.eos_token_ids
        until(partial(at_rest, stub), "the load is not reported")
        assert reported(stub).max_total_num_tokens == 4 * (64 if role == "prefill" else 32)
        chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        data = b"".join(chunk.data for chunk in chunks)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(
            zipfile.ZipFile(io.BytesIO(data)).namelist()
        )
    with grpc.insecure_channel(pair.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_what_is_not_served_says_so(pair: Pair) -> None:
    for ask in (
        lambda: pair.decode.Embed(vllm.EmbedRequest()),
        lambda: pair.decode.FlushCache(common_pb2.FlushCacheRequest()),
        lambda: pair.decode.StartProfile(common_pb2.StartProfileRequest()),
        lambda: pair.decode.StopProfile(common_pb2.StopProfileRequest()),
        lambda: list(pair.decode.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_many_pairs_at_once_leave_nothing_behind(pair: Pair) -> None:
    wrong: list[BaseException] = []

    def one(number: int) -> None:
        try:
            ids = [30 + number * 3 + i for i in range(9)]
            messages = list(call(pair.decode, f"m{number}", ticket_of(pair, f"m{number}", ids=ids), ids=ids))
            assert messages[-1].complete.completion_tokens == 6
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    pair.rig.quiesce()


def test_a_taken_port_ends_the_start_and_names_its_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = rigs.merged(
            rigs.tiny_config(write_tiny_model(tmp_path / "model")), {"pools.decode.vllm_grpc": address}
        )
        with pytest.raises(RuntimeError) as caught, rigs.running(tmp_path, config):
            pass
    assert "baton serve ended with 2" in str(caught.value)
    assert f"pools.decode.vllm_grpc: cannot listen on {address}" in str(caught.value)
