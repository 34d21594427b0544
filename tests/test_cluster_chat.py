"""`baton chat`: turns, commands, interrupts, and the prefix cache that makes later turns cheap."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from baton.cluster import config_load
from baton.cluster.chat import Conversation, Ended, Message, Pieces, Wanted, converse
from baton.cluster.chat_local import LocalModel
from baton.cluster.chat_remote import RemoteModel
from baton.cluster.cli_jobs import batch, chat
from baton.proto.errors import ConfigError, InvalidRequest
from baton.tests.harness.rig import tiny_config
from baton.tests.harness.router_rig import router_rig

WANTED = Wanted(max_tokens=12, temperature=0.0, top_p=1.0, seed=0)


@pytest.fixture(scope="module")
def config_file(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "c.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tiny_dir)))
    return path


@pytest.fixture(scope="module")
def local(config_file: Path) -> LocalModel:
    settings = ["kv.memory=1MiB", "pools.decode.memory=1MiB", "kv.block_size=4"]
    return LocalModel.load(config_load.load(str(config_file), settings))


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def said(pieces: Pieces) -> tuple[str, Ended]:
    *texts, ended = list(pieces)
    assert isinstance(ended, Ended)
    return "".join(text for text in texts if isinstance(text, str)), ended


def user(text: str) -> list[Message]:
    return Conversation("").ask(text)


def test_the_second_turn_finds_the_first_one_in_the_prefix_cache(local: LocalModel) -> None:
    conversation = Conversation("be brief")
    answer, first = said(local.answer(conversation.ask("what is this"), WANTED))
    conversation.answered("what is this", answer)
    again, second = said(local.answer(conversation.ask("and that"), WANTED))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens // 4 * 4
    assert second.prompt_tokens > first.prompt_tokens
    assert 1 <= first.tokens <= 12
    assert said(local.answer(conversation.ask("and that"), WANTED))[0] == again  # all of it cached: the same answer


def test_an_answer_that_is_stopped_leaves_the_model_free_for_the_next(local: LocalModel) -> None:
    whole, _ = said(local.answer(user("stop me"), WANTED))
    pieces = local.answer(user("stop me"), WANTED)
    next(pieces)
    pieces.close()
    assert said(local.answer(user("stop me"), WANTED))[0] == whole


def test_a_conversation_that_fills_the_context_is_refused_with_the_way_out(local: LocalModel) -> None:
    with pytest.raises(InvalidRequest, match="the context 256; /reset begins a new one"):
        list(local.answer(user("x" * 300), WANTED))
    _, ended = said(local.answer(user("x" * 200), Wanted(None, 0.0, 1.0, 0)))
    assert ended.prompt_tokens + ended.tokens <= 256


def test_the_settings_of_the_engine_reach_the_model_here(config_file: Path) -> None:
    model = LocalModel.load(config_load.load(str(config_file), ["engine.prefix_cache=false"]))
    for _ in range(2):
        assert said(model.answer(user("what is this"), WANTED))[1].cached_tokens == 0


class Echo:
    """Repeats what it was told, a word at a time; at "stop" somebody presses Ctrl-C."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []

    def answer(self, messages: Sequence[Message], wanted: Wanted) -> Pieces:
        self.heard.append(list(messages))
        text = messages[-1]["content"]
        if text == "fail":
            raise InvalidRequest("no", field="messages")
        for word in text.split():
            if word == "stop":
                signal.raise_signal(signal.SIGINT)
            yield word
        yield Ended(9, 4, len(text.split()))


def talk(monkeypatch: pytest.MonkeyPatch, lines: str) -> tuple[Echo, int]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    echo = Echo()
    return echo, converse(echo, WANTED, "sys")


def test_lines_of_stdin_are_turns_of_one_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo, code = talk(monkeypatch, "one\n\n/etc/hosts two\n/nope\n/reset\nthree\n/quit\nfour\n")
    out, err = capsys.readouterr()
    assert (code, out) == (0, "one\n/etc/hoststwo\nthree\n")
    assert "There is no /nope" in err
    assert "4 of 9 prompt tokens cached" in err
    roles = [[message["role"] for message in messages] for messages in echo.heard]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_an_answer_that_fails_is_no_turn_and_one_that_is_stopped_is_kept_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo, code = talk(monkeypatch, "fail\nnow stop right here\nwell")
    out, err = capsys.readouterr()
    assert (code, out) == (1, "nowstop\nwell\n")
    assert "invalid_request: messages: no" in err
    assert "[stopped]" in err
    assert [message["content"] for message in echo.heard[-1]] == ["sys", "now stop right here", "nowstop", "well"]


async def test_a_running_cluster_answers_too(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:

        def ask() -> tuple[str, Ended]:
            with RemoteModel(rig.addresses["grpc"]) as remote:
                return said(remote.answer(user("hi"), WANTED))

        text, ended = await asyncio.to_thread(ask)
    assert (text, ended.tokens, ended.cached_tokens) == ("hello", 6, 3)


def test_the_command_answers_each_line_of_stdin(config_file: Path) -> None:
    command = [sys.executable, "-m", "baton.cluster.cli", "chat", str(config_file), "--local", "--max-tokens", "5"]
    done = subprocess.run(command, input="hello\nagain\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("prompt tokens cached]") == 2
    assert " 0 of " not in done.stderr.splitlines()[-1]


def test_mistakes_in_arguments_are_named(tmp_path: Path, config_file: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    mistakes: dict[str, Callable[[], None]] = {
        "give either CONFIG --local or --address": lambda: chat("c.yaml"),
        "--local needs CONFIG": lambda: chat(local=True),
        "CONFIG goes with --local": lambda: chat("c.yaml", address="h:1"),
        "--address: h: expected HOST:PORT": lambda: chat(address="h"),
        "--set needs --config": lambda: chat(address="h:1", set_=["a=1"]),
        "--config (start a cluster for this job) or --url": lambda: batch(source, tmp_path / "out"),
        "--url: h:1: expected a URL": lambda: batch(source, tmp_path / "out", url="h:1"),
        "--print-config needs": lambda: batch(source, tmp_path / "out", url="http://h:1", print_config=True),
        "none: No such file": lambda: batch(tmp_path / "none", tmp_path / "out", config=str(config_file)),
    }
    for expected, command in mistakes.items():
        with pytest.raises(ConfigError) as caught:
            command()
        assert expected in str(caught.value)
