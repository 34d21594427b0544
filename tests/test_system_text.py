"""Stop strings and streaming through the whole cluster, with scripted tokens: ST-08 and around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.oracles import check_accounts, check_processes, footprint, pool_leftovers
from baton.tests.harness.rig import Rig, running, tiny_config
from baton.tests.harness.tiny_model import EOS, chain, special_id, write_scripted_model

END = special_id(EOS)
# After "?" the model says ABCDEFGHIJ. After "!" it says "caf" + the two bytes of é + "+" + the three of 日 + "-".
SCRIPT = chain(*b"?ABCDEFGHIJ.") | chain(*"!caf\u00e9+\u65e5-".encode())


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"), {"decode.step": "gate"})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Rig]:
    model = write_scripted_model(tmp_path_factory.mktemp("scripted") / "scripted", SCRIPT)
    with running(tmp_path_factory.mktemp("text"), tiny_config(model), gates) as rig:
        yield rig


@pytest.fixture
def rig(cluster: Rig, gates: Gates) -> Iterator[Rig]:
    yield cluster
    gates.release_all()
    cluster.quiesce()


def run(rig: Rig, prompt: str, **fields: Any) -> tuple[str, str, str, int, list[str]]:
    """(text, reason, matched stop, completion tokens, the text after each message)."""
    stream = rig.client.stream(prompt=prompt, max_tokens=40, temperature=0, **fields)
    seen = [answer.choices[0].text for answer in stream]
    answer = stream.answer
    answer.check_whole()
    return answer.text, answer.reason, answer.choices[0].matched_stop, answer.usage.completion_tokens, seen


def http_text(rig: Rig, stream: bool, prompt: str, **fields: Any) -> tuple[str, str]:
    """(text, finish reason) of a completion over HTTP."""
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": stream, **fields}
    response = httpx.post(f"{rig.http}/v1/completions", json=body, timeout=60).raise_for_status()
    if not stream:
        choice = response.json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    return "".join(choice["text"] for choice in choices), reasons[0]


def test_the_script_is_followed_to_its_end(rig: Rig) -> None:
    text, reason, matched, tokens, _ = run(rig, "Say ?")
    assert (text, reason, matched, tokens) == ("ABCDEFGHIJ.", "stop", "", 12)  # the end of sequence is the twelfth


def test_a_prompt_without_a_script_ends_at_once(rig: Rig) -> None:
    assert run(rig, "Say x")[:4] == ("", "stop", "", 1)


@pytest.mark.parametrize(
    ("stops", "include", "text", "matched", "tokens"),
    [
        (["DEFGHIJ"], False, "ABC", "DEFGHIJ", 10),
        (["DEFGHIJ"], True, "ABCDEFGHIJ", "DEFGHIJ", 10),
        (["A"], False, "", "A", 1),  # on the token that prefill sampled
        (["AB"], False, "", "AB", 2),  # its first half in prefill's token
        (["CD", "CDE"], False, "AB", "CD", 4),
        (["CDE", "CD"], True, "ABCD", "CD", 4),
        (["EF", "DEF"], False, "ABC", "DEF", 6),
        (["HIJX"], False, "ABCDEFGHIJ.", "", 12),  # near miss: what was held back comes out
        (["J.X", "Q"], False, "ABCDEFGHIJ.", "", 12),  # near miss that the end of sequence cuts off
    ],
)
def test_st_08_stop_strings(rig: Rig, stops: list[str], include: bool, text: str, matched: str, tokens: int) -> None:
    found = run(rig, "Say ?", stop=stops, include_stop=include)
    assert found[:4] == (text, "stop", matched, tokens)
    for shown in found[4]:
        assert text.startswith(shown)  # nothing was shown that had to be taken back
    if not include:
        assert http_text(rig, False, "Say ?", stop=stops) == http_text(rig, True, "Say ?", stop=stops) == (text, "stop")


def test_st_08_stop_inside_and_after_multi_byte_characters(rig: Rig) -> None:
    whole = run(rig, "Say !")
    assert whole[0] == "caf\u00e9+\u65e5-"
    assert all("\ufffd" not in shown for shown in whole[4])
    assert run(rig, "Say !", stop=["\u00e9"])[:4] == ("caf", "stop", "\u00e9", 5)
    assert run(rig, "Say !", stop=["+\u65e5"])[:4] == ("caf\u00e9", "stop", "+\u65e5", 9)
    cut = rig.client.generate(prompt="Say !", max_tokens=4, temperature=0)  # ends inside é
    assert (cut.text, cut.reason) == ("caf\ufffd", "length")


def test_st_08_min_tokens_and_stop_ids(rig: Rig) -> None:
    assert run(rig, "Say ?", stop_token_ids=[ord("D")])[:4] == ("ABC", "stop", "", 4)
    assert run(rig, "Say ?", stop_token_ids=[ord("D")], ignore_eos=True)[:4] == ("ABC", "stop", "", 4)


def test_st_09_ignore_eos_runs_to_the_cap(rig: Rig) -> None:
    answer = rig.client.generate(prompt="Say ?", max_tokens=15, temperature=0, ignore_eos=True)
    assert (answer.token_ids, answer.reason) == ([*b"ABCDEFGHIJ.", END, END, END, END], "length")


def test_the_oracles_see_a_running_request(rig: Rig, gates: Gates) -> None:
    gates.close("decode.step")
    stream = rig.client.stream(prompt="Say ?", max_tokens=120, temperature=0, ignore_eos=True)
    stream.until_tokens(1)
    with pytest.raises(AssertionError, match="O-acct: accepted"):
        check_accounts(rig.http)
    gates.release("decode.step")
    stream.rest()
    with pytest.raises(AssertionError, match="O-proc"):
        check_processes(footprint(rig.process.pid), within_s=0.1)
    metrics = rig.metrics()
    metrics["baton_kv_used_blocks"] = dict.fromkeys(metrics["baton_kv_used_blocks"], 1.0)
    assert len(pool_leftovers(metrics)) == 2
    del metrics["baton_kv_held_legs"]
    assert "baton_kv_held_legs is missing" in pool_leftovers(metrics)


@pytest.mark.parametrize("stream", [False, True])
def test_ml_05_over_http_and_grpc(rig: Rig, stream: bool) -> None:
    url = f"{rig.http}/v1/chat/completions"
    for messages in ([], [{"role": "wizard", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        response = httpx.post(url, json={"model": "scripted", "messages": messages, "stream": stream}, timeout=30)
        assert response.status_code == 400, messages
    status, message = rig.client.refused(messages=[{"role": "wizard", "content": "x"}])
    assert (status.name, "unknown role wizard" in message) == ("INVALID_ARGUMENT", True)
    parts = [{"type": "text", "text": "Say"}]
    body = {"model": "scripted", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "stream": stream}
    assert httpx.post(url, json=body, timeout=30).status_code == 200
