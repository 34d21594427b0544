"""One answer in OpenAI's shape, put together from its parts: whole, or as the events of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..text.tokenizer import Tokenizer
from ..text.tool_calls import CallBegin, Part, ToolCallParser, ToolStyle
from .openai_shapes import Format, Json, Scores, prompt_scores, usage_body
from .requests import ChoiceEnd, Chunk, Output, TokenScore, Usage


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt, as its answer repeats it."""

    text: str
    ids: Sequence[int]
    scores: Scores | None  # None: nobody asked


@dataclass(slots=True)
class _Choice:
    """What one choice has said; in streams only `shown` and the parser are kept up."""

    parser: ToolCallParser | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    end: ChoiceEnd | None = None
    shown: int = 0  # characters of its tokens so far


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked to see."""

    n: int  # choices per prompt
    token_ids: bool
    logprobs: bool
    usage: bool  # in the stream
    usage_in_each: bool = False  # event
    echo: bool = False
    scores_only: bool = False  # of the prompt: what is generated is not shown
    prompt_logprobs: bool = False
    tool_style: ToolStyle | None = None  # None: no tools


class AnswerBuilder:
    """Puts one answer together. Choice c of prompt p has the index p x n + c.

    echoes: the prompts, there before the first part of their answers.
    """

    def __init__(
        self, form: Format, answer_id: str, created: int, model: str, tokenizer: Tokenizer, wanted: Wanted
    ) -> None:
        self.echoes: dict[int, Echo] = {}
        self._form = form
        self._answer_id = answer_id
        self._head = {"id": form.id_prefix + answer_id, "created": created, "model": model}
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._choices: dict[int, _Choice] = {}
        self._usages: list[Usage] = []
        self._said = 0  # tokens, over all choices

    # ---- whole answers ---------------------------------------------------------------------------------------------

    def add(self, prompt: int, output: Output) -> None:
        """Takes in a part of the answer."""
        choice, _ = self._choice(prompt, output)
        parts: Sequence[Part]
        if isinstance(output, ChoiceEnd):
            parts = choice.parser.flush() if choice.parser else []
            self._ended(choice, output)
        elif self._wanted.scores_only:
            return
        else:
            parts = self._parts(choice, output)
            choice.token_ids += output.token_ids
            choice.scores += output.scores
        for part in parts:
            if isinstance(part, str):
                choice.text += part
            elif isinstance(part, CallBegin):
                choice.calls.append([part.name, ""])
            else:
                choice.calls[-1][1] += part.text

    def whole(self) -> Json:
        """The answer after its last part."""
        choices, top = [], {}
        for index, choice in sorted(self._choices.items()):
            echo = self.echoes.get(index // self._wanted.n) or Echo("", (), ())
            repeated = echo if self._wanted.echo else Echo("", (), ())
            calls = [self._call(index, number, *call) for number, call in enumerate(choice.calls)]
            body = {"index": index, **self._form.whole(repeated.text + choice.text, calls)}
            ids, scores = [*repeated.ids, *choice.token_ids], [*(repeated.scores or ()), *choice.scores]
            body["logprobs"] = self._scores(choice, ids, scores)
            if self._wanted.prompt_logprobs:
                top = {"prompt_logprobs": prompt_scores(self._tokenizer, echo.ids, echo.scores or ())}
                body |= top
            choices.append(body | self._ending(choice) | self._ids(choice.token_ids))
        return {**self._head, "object": self._form.object_name, "choices": choices, "usage": self._usage()} | top

    # ---- streams ---------------------------------------------------------------------------------------------------

    def events(self, prompt: int, output: Output) -> list[Json]:
        """The events for one part of the answer; none while its text is held back and nothing else was asked for."""
        choice, is_new = self._choice(prompt, output)
        index = prompt * self._wanted.n + output.choice
        events = self._openings(prompt, index, choice) if is_new else []
        if isinstance(output, ChoiceEnd):
            parts = choice.parser.flush() if choice.parser else []
            self._ended(choice, output)
            events += [self._event(index, content) for content in self._contents(index, choice, parts)]
            return [*events, self._event(index, self._form.delta(""), self._ending(choice))]
        self._said += 0 if self._wanted.scores_only else len(output.token_ids)
        if self._wanted.scores_only or not (output.text or self._wanted.token_ids or output.scores):
            return events
        scores = self._scores(choice, output.token_ids, output.scores)
        more = {"logprobs": scores} | self._ids(output.token_ids)
        contents = self._contents(index, choice, self._parts(choice, output))
        if not contents and (scores or self._wanted.token_ids):
            contents = [self._form.delta("")]
        for content in contents:  # what belongs to the tokens is in the first of their events
            events.append(self._event(index, content, more))
            more = {}
        return events

    @property
    def shows_ids(self) -> bool:
        """Whether events have the ids of their tokens."""
        return self._wanted.token_ids

    def sample(self, index: int, mark: str) -> Json | None:
        """An event of a choice that has begun, with `mark` for its text and its ids, where events of text differ in
        nothing else; else None."""
        wanted, choice = self._wanted, self._choices.get(index)
        if choice is None or choice.parser or wanted.logprobs or wanted.usage_in_each or wanted.scores_only:
            return None
        return self._event(index, self._form.delta(mark), {"token_ids": mark} if wanted.token_ids else {})

    def usage_event(self) -> Json | None:
        """The event after the last choice, when the client asked for it."""
        if not self._wanted.usage:
            return None
        return {**self._head, "object": self._form.chunk_name, "choices": [], "usage": self._usage()}

    def _openings(self, prompt: int, index: int, choice: _Choice) -> list[Json]:
        events = [self._event(index, self._form.opening)] if self._form.opening is not None else []
        echo = self.echoes.get(prompt)
        if echo is not None and self._wanted.echo:
            scores = self._scores(choice, echo.ids, echo.scores or ()) if echo.scores else None
            events.append(self._event(index, self._form.delta(echo.text), {"logprobs": scores}))
        return events

    def _contents(self, index: int, choice: _Choice, parts: Sequence[Part]) -> list[Json]:
        """One for each part of the text; the deltas of tool calls have OpenAI's shape."""
        contents: list[Json] = []
        for part in parts:
            if isinstance(part, str):
                contents.append(self._form.delta(part))
                continue
            if isinstance(part, CallBegin):
                choice.calls.append([part.name, ""])
                call = self._call(index, len(choice.calls) - 1, part.name, "")
            else:
                call = {"function": {"arguments": part.text}}
            contents.append({"delta": {"tool_calls": [{"index": len(choice.calls) - 1, **call}]}})
        return contents

    def _event(self, index: int, content: Json, more: Json | None = None) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **(more or {})}
        usage: Json = {"usage": None} if self._wanted.usage else {}
        if self._wanted.usage_in_each:
            prompt = sum(len(echo.ids) for echo in self.echoes.values())
            usage = {"usage": usage_body([Usage(prompt, self._said, 0)])}
        return {**self._head, "object": self._form.chunk_name, "choices": [choice], **usage}

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _choice(self, prompt: int, output: Output) -> tuple[_Choice, bool]:
        """(the choice, whether it is a new one)."""
        index = prompt * self._wanted.n + output.choice
        known = self._choices.get(index)
        if known is not None:
            return known, False
        style = self._wanted.tool_style
        made = self._choices[index] = _Choice(ToolCallParser(style) if style else None)
        return made, True

    def _parts(self, choice: _Choice, output: Chunk) -> Sequence[Part]:
        if choice.parser is not None:
            return choice.parser.push(output.text)
        return [output.text] if output.text else []

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        style, call_id = self._wanted.tool_style, f"call_{self._answer_id.removeprefix('req-')[:20]}{index}_{number}"
        if style is not None and style.id_characters is not None:
            call_id = hashlib.sha256(f"{self._answer_id}{call_id}".encode()).hexdigest()[: style.id_characters]
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _ended(self, choice: _Choice, end: ChoiceEnd) -> None:
        choice.end = end
        if end.usage is not None:
            shown = Usage(end.usage.prompt_tokens, 0, end.usage.cached_tokens)
            self._usages.append(shown if self._wanted.scores_only else end.usage)

    def _ending(self, choice: _Choice) -> Json:
        """finish_reason is never invented: it is null for a choice that did not end."""
        end = choice.end
        if end is None:
            return {"finish_reason": None, "stop_reason": None}
        called = choice.parser is not None and choice.parser.calls and end.reason == "stop"
        reason = "tool_calls" if called else "length" if self._wanted.scores_only else end.reason
        return {"finish_reason": reason, "stop_reason": end.matched_stop or None}

    def _usage(self) -> Json:
        return usage_body(self._usages)

    def _ids(self, ids: Sequence[int]) -> Json:
        return {"token_ids": list(ids)} if self._wanted.token_ids else {}

    def _scores(self, choice: _Choice, ids: Sequence[int], scores: Scores) -> Json | None:
        if not self._wanted.logprobs:
            return None
        made, choice.shown = self._form.scores(self._tokenizer, ids, scores, choice.shown)
        return made
