"""`generate` and its inputs: flags and JSON lines become requests, answers become text or JSON lines in input order."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from baton.client.api import Client
from baton.cluster import cli, requests_input
from baton.cluster.admin import show_status
from baton.cluster.failures import error_text
from baton.cluster.generate import with_address
from baton.cluster.membership import Member
from baton.cluster.requests_input import RequestLine, from_fields, read_lines
from baton.proto import baton_pb2 as api
from baton.proto.errors import ConfigError, InvalidRequest
from baton.tests.harness.mock_router import MockRouter, Script, accepted, finished, serving, tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def test_every_field_of_a_line_reaches_the_request() -> None:
    line = from_fields(
        {
            "id": "a",
            "prompt_token_ids": [1, 2],
            "max_tokens": 3,
            "min_tokens": 1,
            "temperature": 0,
            "top_k": 4,
            "top_p": 0.5,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": -1,
            "frequency_penalty": 0.5,
            "logit_bias": {"7": -100},
            "seed": 2**64 - 1,
            "n": 2,
            "stop": ["x", "y"],
            "stop_token_ids": [9],
            "ignore_eos": False,
            "include_stop": True,
            "logprobs": 0,
            "cache_salt": "s",
            "session_id": "c",
            "priority": -1,
            "stream_interval": 2,
            "prompt_logprobs": 1,
            "json_schema": {"type": "object"},
        },
        "f:1",
    )
    request = line.to_wire()
    assert list(request.token_ids.ids) == [1, 2]
    assert (request.request_id, request.max_tokens, request.temperature, request.seed) == ("a", 3, 0.0, 2**64 - 1)
    assert (dict(request.logit_bias), list(request.stop), list(request.stop_token_ids)) == ({7: -100}, ["x", "y"], [9])
    for name in ("temperature", "ignore_eos", "logprobs"):
        assert request.HasField(name)  # 0 and false are values
    assert len(request.ListFields()) == len(api.GenerateRequest.DESCRIPTOR.fields) - 2 - 4  # one input, one constraint
    assert from_fields({"prompt": "", "one_of": ["a", "b"]}, "f:1").to_wire().one_of.texts == ["a", "b"]
    with pytest.raises(ConfigError, match="f:1: grammar: the answer must follow regex already"):
        from_fields({"prompt": "", "regex": "a", "grammar": "b"}, "f:1")


def test_what_is_not_given_is_left_to_the_server() -> None:
    request = from_fields({"prompt": "", "stop": "end"}, "f:1").to_wire()
    assert request.WhichOneof("input") == "prompt"
    assert [field.name for field, _ in request.ListFields()] == ["prompt", "stop"]
    chat = from_fields({"messages": requests_input.chat("hi")}, "f:1").to_wire()
    assert [(m.role, m.content) for m in chat.messages.messages] == [("user", "hi")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"promt": "x"}, "f:1: promt: unknown field; did you mean prompt?"),
        ({"prompt": "x", "max_token": 1}, "f:1: max_token: unknown field; did you mean max_tokens?"),
        ({"prompt": "x", "max_tokens": "5"}, "f:1: max_tokens: Input should be a valid integer"),
        ({"prompt": 5}, "f:1: prompt: Input should be a valid string"),
        ({"prompt_token_ids": [-1]}, "f:1: prompt_token_ids: Input should be greater than or equal to 0"),
        ({"prompt": "\udcff\udcfe bad"}, "f:1: prompt: not valid Unicode text"),
        ({"prompt": "x", "stop": ["a", "\ud800"]}, "f:1: stop: not valid Unicode text"),
        ({"prompt": "x", "id": "\ud800"}, "f:1: id: not valid Unicode text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "f:1: messages: not valid Unicode text"),
        (
            {"prompt": "x", "\ud800": 1},
            "f:1: not valid Unicode text: a lone surrogate at character 0 in the field name",
        ),
        ({"prompt": "x", "logit_bias": {"99999999999": 1}}, "f:1: logit_bias: '99999999999' is no token id"),
        ({"prompt": "x", "logit_bias": {"2147483648": 1}}, "f:1: logit_bias: '2147483648' is no token id"),
        ({"prompt": "x", "logit_bias": {"abc": 1}}, "f:1: logit_bias: 'abc' is no token id"),
        ({"prompt": "x", "logit_bias": {"1": float("nan")}}, "f:1: logit_bias: Input should be a finite number"),
        ({"prompt": "x", "temperature": float("inf")}, "f:1: temperature: Input should be a finite number"),
        ({"prompt": "x", "top_p": 1e300}, "f:1: top_p: Input should be less than or equal to"),
        ({"prompt": "x", "max_tokens": 2**31}, "f:1: max_tokens: Input should be less than or equal to"),
        ({"prompt_token_ids": [2**31]}, "f:1: prompt_token_ids: Input should be less than or equal to"),
        ({"prompt": "x", "seed": 2**64}, "f:1: seed: Input should be less than or equal to"),
        ({}, "f:1: give exactly one of prompt, prompt_token_ids, messages, not none"),
        ({"prompt": "x", "messages": []}, "f:1: give exactly one of"),
    ],
)
def test_mistakes_in_a_line_are_named(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_fields(fields, "f:1")
    assert str(caught.value).startswith(expected)


def test_a_file_is_read_whole_and_all_its_mistakes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "a\\u2028b"}\n\n{"prompt": "b", "max_tokens": 2}\n', encoding="utf-8")
    lines = read_lines(path, {"max_tokens": 9, "seed": None})
    assert [(line.id, line.max_tokens) for line in lines] == [(1, 9), (None, 2)]
    path.write_text('{"prompt": "a"}\n{nonsense\n[1]\n{"x": 1, "prompt": "a"}\n')
    with pytest.raises(ConfigError) as caught:
        read_lines(path, {})
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:{n}" for n in (2, 3, 4)]
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_lines(path, {})
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read_lines(tmp_path / "none.jsonl", {})


def test_what_json_allows_and_no_request_can_carry_is_told_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    faulty = (
        r'{"prompt": "\ud800 x"}',
        '{"prompt": "a", "seed": 1' + "0" * 5000 + "}",
        '{"prompt": "a", "stop": ' + "[" * 100 + "]" * 100 + "}",
        "[" * 100_000,
        '{"prompt": "a", "min_p": NaN}',
        '{"prompt": "a", "min_p": 1e999}',
    )
    path.write_text('{"prompt": "fine"}\n' + "\n".join(faulty))
    with pytest.raises(ConfigError) as caught:
        read_lines(path, {})
    told = [line.split(": ")[:2] for line in str(caught.value).splitlines()]
    fields = ["prompt", "seed", "stop", "not JSON", "min_p", "min_p"]
    assert told == [[f"{path}:{number}", field] for number, field in enumerate(fields, start=2)]


NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 3.5e38, 10**400])
TEXTS = st.text(st.characters(codec=None), max_size=3) | st.sampled_from(["7", "007", "2147483647", "2147483648", "-1"])
VALUES = st.none() | st.booleans() | NUMBERS | TEXTS
ANYTHING = VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(TEXTS, VALUES, max_size=2)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(sorted(RequestLine.model_fields)), ANYTHING, max_size=4), st.booleans())
def test_whatever_is_accepted_can_be_sent(fields: dict[str, Any], prompt: bool) -> None:
    if prompt:
        fields = {**dict.fromkeys(("messages", "prompt_token_ids")), **fields, "prompt": "x"}
    try:
        line = from_fields(fields, "f:1")
    except ConfigError:
        return
    line.to_wire().SerializeToString()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert [line.prompt for line in read_lines(path, {})] == ["a"]


def test_requests_may_come_on_stdin_and_a_second_process_reads_them_again() -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from baton.cluster.requests_input import read_lines\n"
        "print([line.prompt for line in read_lines(Path('-'), {})], flush=True)\n"
        "if len(sys.argv) > 1: subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
    )
    command = [sys.executable, "-c", code, code]
    done = subprocess.run(command, input='{"prompt": "é"}\n', text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout == "['é']\n" * 2
    command = [sys.executable, "-m", "baton.cluster.cli", "generate", "--address", "h:1", "--input", "-"]
    done = subprocess.run(command, input="{", text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "stdin:1: not JSON" in done.stderr


async def test_a_request_that_grpc_finds_too_large_is_not_called_retryable() -> None:
    async with serving(MockRouter(lambda request: [(0.0, finished())])) as address, Client(address) as client:
        with pytest.raises(InvalidRequest, match=f"larger than {address} takes"):
            await client.complete(api.GenerateRequest(prompt="x" * (5 << 20)))


def lines(count: int) -> list[RequestLine]:
    return [from_fields({"prompt": str(number)}, "f") for number in range(count)]


async def test_answers_come_in_input_order_whatever_ends_first(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: api.GenerateRequest) -> Script:
        number = int(request.prompt)
        if number == 2:
            return [(0.0, InvalidRequest("too long", field="prompt"))]
        return [(0.1 - 0.02 * number, accepted()), (0.0, tokens(number, text=f"é{number}")), (0.0, finished())]

    async with serving(MockRouter(answer)) as address:
        assert await with_address(address, lines(5), as_json=True, report=False) == 1
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in out] == [0, 1, 2, 3, 4]
    assert out[2]["error"] == {"code": "invalid_request", "message": "too long", "field": "prompt"}
    assert (out[1]["text"], out[1]["token_ids"], out[1]["finish_reason"]) == ("é1", [1], "length")
    assert out[1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    assert out[1]["timing"]["kv_bytes"] == 2**40
    assert out[1]["timing"]["decode_s"] == 0


async def test_at_most_64_requests_run_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    router = MockRouter(lambda request: [(0.05, tokens(1)), (0.0, finished())])
    async with serving(router) as address:
        assert await with_address(address, lines(150), as_json=True, report=False) == 0
    assert router.most_running <= 64
    assert len(capsys.readouterr().out.splitlines()) == 150


async def test_several_choices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    script: Script = [
        (0.0, tokens(1, text="a")),
        (0.0, tokens(2, text="b", choice=1)),
        (0.0, finished(choice=1)),
        (0.0, finished()),
    ]
    one = [from_fields({"prompt": "x", "n": 2}, "f")]
    async with serving(MockRouter(lambda request: script)) as address:
        assert await with_address(address, one, as_json=True, report=False) == 0
        line = json.loads(capsys.readouterr().out)
        assert await with_address(address, one, as_json=False, report=False) == 0
    assert [(c["index"], c["text"], c["token_ids"]) for c in line["choices"]] == [(0, "a", [1]), (1, "b", [2])]
    assert line["text"] == "a"
    assert capsys.readouterr().out == "[0] a\n[1] b\n"


async def test_one_prompt_is_streamed_to_stdout_and_the_report_goes_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script: Script = [(0.0, accepted()), (0.0, tokens(1, text="Pa")), (0.0, tokens(2, text="ris")), (0.0, finished())]
    member = Member("prefill-0", "i", "prefill", "h:1", "ready", 77, "node-a", 1, 0)
    async with serving(MockRouter(lambda request: script)) as address:
        assert await with_address(address, lines(1), False, True, [member], 1.5) == 0
    printed = capsys.readouterr()
    assert printed.out == "Paris\n"
    for part in ("cluster started in 1.5 s", "77 @ node-a", "prefill-0 -> decode-0", "1.0 TiB of KV in 0 frames"):
        assert part in printed.err


async def test_an_error_in_the_middle_of_a_stream_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    script: Script = [(0.0, tokens(1, text="Pa")), (0.0, InvalidRequest("no", field="n"))]
    async with serving(MockRouter(lambda request: script)) as address:
        assert await with_address(address, lines(1), as_json=False, report=False) == 1
    assert capsys.readouterr() == ("Pa\n", "baton: invalid_request: n: no\n")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cluster.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "--prompt", "x"], "give either --config"),
        (["generate", "--address", "localhost", "--prompt", "x"], "--address: localhost: expected HOST:PORT"),
        (["generate", "--address", "h:1", "--config", "c", "--prompt", "x"], "give either --config"),
        (["generate", "--address", "h:1", "--prompt", "\udcff bad"], "arguments: prompt: not valid Unicode text"),
        (["generate", "--address", "h:1", "--prompt", "x", "--seed", str(2**64)], "arguments: seed: "),
        (["generate", "--address", "h:1"], "give either --prompt or --input"),
        (["generate", "--address", "h:1", "--input", "none.jsonl"], "none.jsonl: No such file"),
        (["generate", "--config", "none.yaml", "--prompt", "x"], "none.yaml: no such file"),
        (["generate", "--address", "h:1", "--prompt", "x", "--set", "a=1"], "--set needs --config"),
        (["generate", "--address", "h:1", "--prompt", "x", "--print-config"], "--print-config needs --config"),
        (["generate", "--address", "h:1", "--input", "f", "--chat"], "--chat goes with --prompt"),
        (["bench", "--address", "h:1", "--set", "a=1"], "--set needs --config"),
        (["bench", "--address", "h:1", "--print-config"], "--print-config needs --config"),
        (["bench", "--address", "h:1", "--rate", "x"], "--rate: x"),
        (["status", "--address", "nowhere"], "--address: nowhere"),
        (["serve", "none.yaml"], "none.yaml: no such file"),
        (["generate", "--address", "h:1", "--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_mistakes_in_arguments_exit_2_and_name_the_argument(arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr


def test_nobody_answers_is_exit_1_with_the_address() -> None:
    for arguments in (
        ["generate", "--address", "127.0.0.1:1", "--prompt", "x"],
        ["status", "--address", "127.0.0.1:1"],
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert "127.0.0.1:1" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: smollm2-135m-instruct}\n")
    command = [sys.executable, "-m", "baton.cluster.cli", "serve", str(path), "--print-config"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "baton: cannot write to standard output: No space left on device\n")


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"baton {metadata.version('baton')}\n"


async def test_a_router_is_no_admin_service(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(MockRouter(lambda request: [])) as address:
        assert await asyncio.to_thread(show_status, address, False) == 1
    assert f"{address} is not the admin port of a cluster (router.admin)" in capsys.readouterr().err


def test_a_field_that_the_message_names_is_not_named_twice() -> None:
    assert error_text(InvalidRequest("n: too many", field="n")) == "invalid_request: n: too many"
    assert error_text(InvalidRequest("name it", field="n")) == "invalid_request: n: name it"


def test_help_is_fast_to_import_and_has_examples() -> None:
    assert not {"baton.cluster.config", "baton.cluster.deployment"} & set(cli.__dict__)
    code = (
        "import sys; from baton.cluster import cli\n"
        "assert not {'torch', 'ray', 'pydantic', 'yaml', 'tokenizers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    done = run("generate", "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
