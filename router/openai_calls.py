"""One call of an OpenAI endpoint that generates: its body read and checked, and its answer made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..proto.errors import BatonError, InvalidRequest
from ..text import strict_json
from .bounds import check_body
from .front_door import FrontDoor
from .http_streams import merged
from .live import Answer
from .openai_answer import AnswerBuilder, Echo, Wanted
from .openai_schema import ChatRequest, CompletionRequest, parse
from .openai_shapes import ChatFormat, CompletionFormat, Format
from .openai_text_events import TextEvents
from .requests import ClientRequest, Output

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
T = TypeVar("T")
Body = TypeVar("Body", CompletionRequest, ChatRequest)


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """What a client asked for: one request for each prompt."""

    clients: list[ClientRequest]
    form: Format
    wanted: Wanted
    stream: bool


def read_call(door: FrontDoor, path: str, raw: bytes, label: str) -> OpenAICall:
    """The body of a call of COMPLETIONS or CHAT. Raises InvalidRequest, UnknownModel, and counts it; Unavailable."""
    return checked(door, lambda: _read(door, path, raw, label))


def checked(door: FrontDoor, work: Callable[[], T]) -> T:
    """What `work` returns; an error is counted as a refusal."""
    try:
        return work()
    except BatonError as error:
        door.refused(error)
        raise


def json_of(door: FrontDoor, raw: bytes) -> Any:
    """A bounded JSON body. Raises InvalidRequest, Unavailable."""
    limits, context = door.params.limits, door.core.facts().context
    try:
        return strict_json.loads(raw, lambda value: check_body(value, limits, context))
    except strict_json.JsonError as error:
        raise InvalidRequest(f"{error.field or 'the body'}: {error}", field=error.field) from None


def _read(door: FrontDoor, path: str, raw: bytes, label: str) -> OpenAICall:
    data = json_of(door, raw)
    if path == CHAT:
        chat = parse(ChatRequest, data, door.params.served_name)
        client = chat.client(label)
        style = door.text.tool_style
        if client.tools and style is None:
            raise InvalidRequest("tools: this model's chat template takes no tools", field="tools")
        wanted = dataclasses.replace(_wanted(chat, client), tool_style=style if client.tools else None)
        return OpenAICall([client], ChatFormat(), wanted, bool(chat.stream))
    body = parse(CompletionRequest, data, door.params.served_name)
    clients = body.clients(label, door.params.limits.prompts)
    wanted = dataclasses.replace(_wanted(body, clients[0]), echo=bool(body.echo), scores_only=body.scores_only)
    return OpenAICall(clients, CompletionFormat(), wanted, bool(body.stream))


def _wanted(body: CompletionRequest | ChatRequest, client: ClientRequest) -> Wanted:
    """What both endpoints show alike."""
    return Wanted(
        n=client.n or 1,
        token_ids=bool(body.return_token_ids),
        logprobs=client.logprobs is not None,
        usage=body.include_usage,
        usage_in_each=body.usage_in_each,
        prompt_logprobs=body.prompt_logprobs is not None,
    )


class Running:
    """A call whose prompts run. Leave it with `cancel`."""

    def __init__(self, door: FrontDoor, call: OpenAICall) -> None:
        self._door = door
        self._call = call
        self._answers: list[Answer] = []

    async def start(self) -> str:
        """Takes all prompts; returns the request id. Raises what refuses one of them."""
        prepared = [await self._door.prepare(client) for client in self._call.clients]
        for request in prepared:
            self._answers.append(self._door.submit(request))
        params, text = self._door.params, self._door.text
        first, now = self._answers[0].request_id, int(time.time())
        self.builder = AnswerBuilder(self._call.form, first, now, params.served_name, text.tokenizer, self._call.wanted)
        return first

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer, once it was started."""
        return self._answers[0].headers

    def shortcut(self, write: Callable[[bytes], bool]) -> None:
        """While the reader of `parts` waits, events that say no more than text may go straight to `write`, which
        returns False to have the reader woken instead. For a single prompt: several take turns in `parts`."""
        if len(self._answers) == 1:
            self._answers[0].shortcut(TextEvents(self.builder, write).take)

    async def parts(self) -> AsyncIterator[tuple[int, list[Output]]]:
        """(prompt, outputs) as they come; what is repeated of a prompt is with the builder before its first ones."""
        wanted, builder = self._call.wanted, self.builder
        repeats = wanted.echo or wanted.prompt_logprobs or wanted.usage_in_each
        async for prompt, outputs in merged([answer.outputs() for answer in self._answers]):
            if repeats and prompt not in builder.echoes:
                answer, text = self._answers[prompt], self._call.clients[prompt].prompt
                if wanted.echo and text is None:
                    text = await self._door.text.decode(answer.prompt_ids, skip_special=False)
                scored = wanted.prompt_logprobs or (wanted.echo and wanted.logprobs)
                scores = await answer.prompt_scores() if scored else None
                builder.echoes[prompt] = Echo(text or "", answer.prompt_ids, scores)
            yield prompt, outputs

    async def whole(self, make: Callable[[AnswerBuilder], T]) -> T:
        """Waits for all parts. Scores of thousands of tokens are put into shape beside the event loop."""
        async for prompt, outputs in self.parts():
            for output in outputs:
                self.builder.add(prompt, output)
        heavy = self._call.wanted.logprobs or self._call.wanted.prompt_logprobs
        return await self._door.text.work(lambda: make(self.builder)) if heavy else make(self.builder)

    def cancel(self) -> None:
        """Ends what still runs."""
        for answer in self._answers:
            answer.cancel()
