"""Bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Any

from ..proto.errors import InvalidRequest
from .openai_constraint import tools_of
from .openai_schema import Named, chat_message
from .requests import ClientRequest


class TokenizeRequest(Named):
    """A prompt, or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # of a prompt; None: as the tokenizer says
    return_token_strs: bool | None = None

    def client(self) -> ClientRequest:
        """The request whose prompt it is. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", field="prompt")
        if self.messages is None:
            return ClientRequest(prompt=self.prompt, bos=self.add_special_tokens)
        messages = [chat_message(index, message) for index, message in enumerate(self.messages)]
        tools, _ = tools_of(self.tools, None, several=True)
        return ClientRequest(messages=messages, tools=tools, input_field="messages")


class DetokenizeRequest(Named):
    """Token ids."""

    tokens: list[int]
