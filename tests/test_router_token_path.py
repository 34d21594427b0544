"""The short way of tokens: straight to the connection, and the same bytes, order and bounds as the long way."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from baton.router.http_protocol import Protocol, writer
from baton.router.mailbox import Mailbox
from baton.router.openai_answer import AnswerBuilder, Wanted
from baton.router.openai_shapes import ChatFormat, CompletionFormat, Format, event
from baton.router.openai_text_events import TextEvents
from baton.router.requests import ChoiceEnd, Chunk, Output, TokenScore
from baton.tests.harness.router_rig import write_model
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

TEXTS = ["word", ' "quoted" \\ ', "line\nbreak\t\x00\x1f\x7f", "é ß 漢 🙂", "\u2028</script>", "\ufffd"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(resolve(str(write_model(tmp_path_factory.mktemp("model")))))


def builder(form: Format, tokenizer: Tokenizer, **wanted: bool) -> AnswerBuilder:
    shown = {"token_ids": False, "logprobs": False, "usage": False, **wanted}
    made = AnswerBuilder(form, "req-1", 7, 'the "model"', tokenizer, Wanted(n=2, **shown))  # type: ignore[arg-type]
    for choice in range(2):
        made.events(0, Chunk(choice, 0, [5], "a", [TokenScore(-1.0, ())]))
    return made


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("form", [CompletionFormat, ChatFormat])
def test_the_bytes_are_those_of_the_long_way(
    tokenizer: Tokenizer, form: type[Format], token_ids: bool, usage: bool
) -> None:
    made, sent = builder(form(), tokenizer, token_ids=token_ids, usage=usage), list[bytes]()

    def write(part: bytes) -> bool:
        sent.append(part)
        return True

    events = TextEvents(made, write)
    for choice in (0, 1):
        for text in TEXTS:
            for ids in ([6], [7, 0, 12345]):
                chunk = Chunk(choice, 1, ids, text, [])
                assert events.take(chunk)
                assert sent.pop() == b"".join(map(event, made.events(0, chunk)))


def test_what_may_be_more_than_text_is_refused(tokenizer: Tokenizer) -> None:
    def refused(made: AnswerBuilder, chunk: Chunk) -> bool:
        return not TextEvents(made, lambda part: pytest.fail(f"{part!r} was sent")).take(chunk)

    chunk = Chunk(0, 1, [6], "b", [])
    assert refused(builder(CompletionFormat(), tokenizer, logprobs=True), chunk)
    assert refused(builder(CompletionFormat(), tokenizer, usage_in_each=True), chunk)
    assert refused(builder(CompletionFormat(), tokenizer, scores_only=True), chunk)
    assert refused(builder(ChatFormat(), tokenizer, token_ids=True), Chunk(0, 1, [6], "", []))  # half a character
    assert refused(builder(ChatFormat(), tokenizer), Chunk(2, 1, [6], "b", []))  # a choice whose role was not yet said


async def test_the_shortcut_keeps_the_order() -> None:
    """It has a chunk only while the reader waits with nothing before it; what it refuses the reader gets."""
    mailbox, taken, open_ = Mailbox(interval=2), list[Chunk](), [True]
    read = mailbox.read()

    def take(chunk: Chunk) -> bool:
        taken.extend([chunk] * open_[0])
        return open_[0]

    def chunk(offset: int, tokens: int = 2) -> Chunk:
        return Chunk(0, offset, list(range(offset, offset + tokens)), "x" * tokens, [])

    mailbox.shortcut = take
    mailbox.put(chunk(0))
    assert taken == []  # nobody waits yet
    waiting: asyncio.Task[list[Output]] = asyncio.ensure_future(anext(read))
    assert await waiting == [chunk(0)]
    mailbox.put(chunk(2))
    assert taken == []  # the reader is busy with the first
    waiting = asyncio.ensure_future(anext(read))
    assert await waiting == [chunk(2)]
    waiting = asyncio.ensure_future(anext(read))
    await asyncio.sleep(0)
    mailbox.put(chunk(4))
    assert taken == [chunk(4)]
    open_[0] = False  # the client reads too slowly
    mailbox.put(chunk(6))
    open_[0] = True
    mailbox.put(chunk(8))  # behind what waits
    assert (await waiting, taken) == ([chunk(6, 4)], [chunk(4)])
    waiting = asyncio.ensure_future(anext(read))
    await asyncio.sleep(0)
    mailbox.put(chunk(10, 1))  # too little to be sent, and in the way of what follows
    mailbox.put(chunk(11, 2))
    end = ChoiceEnd(0, "stop", "", None, None)
    mailbox.put(end)
    mailbox.close(None)
    assert (await waiting, taken) == ([chunk(10, 3), end], [chunk(4)])


async def test_a_client_that_reads_slowly_is_not_written_to() -> None:
    part, written = b"x" * 1000, [0]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        write = writer(scope)
        assert write is not None
        while write(part):
            written[0] += 1
        slow.set()
        await send({"type": "http.response.body", "body": b"last", "more_body": True})  # waits for the client
        assert write(b"again")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    slow, loop = asyncio.Event(), asyncio.get_running_loop()
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    server = await loop.create_server(lambda: Protocol(config, ServerState(), {}), "127.0.0.1", 0)
    async with server:
        reader, client = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 12)
        client.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.wait_for(slow.wait(), 20)
        answer = await reader.read()
        client.close()
    assert 0 < written[0] < 50_000  # what the sockets hold, and no more
    parts = [b"first", *[part] * written[0], b"last", b"again"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in parts)
    assert answer.partition(b"\r\n\r\n")[2] == body + b"0\r\n\r\n"
