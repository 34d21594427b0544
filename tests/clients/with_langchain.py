"""`langchain-openai` against a server: `python with_langchain.py http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    kind: Literal["adult", "child"]
    age: int = Field(ge=0, le=99)


@tool
def weather(unit: Literal["C", "F"]) -> str:
    """The weather."""
    return f"mild in {unit}"


def main() -> None:
    settings = {"base_url": sys.argv[1], "api_key": "none", "model": "tiny", "max_tokens": 120, "max_retries": 0}
    chat = ChatOpenAI(**settings, temperature=0.7, seed=5, stream_usage=True)
    assert chat.invoke("Say something.").usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream("Say something."))
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)
    assert len(chat.batch(["a", "b", "c"])) == 3
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Who?"), Person)
    assert isinstance(chat.with_structured_output(Person, method="function_calling").invoke("Who?"), Person)
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke("How is the weather?")
    (call,) = called.tool_calls
    assert call["args"]["unit"] in "CF"
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.bind_tools([weather]).invoke([HumanMessage("How is the weather?"), called, result]).content is not None
    merged = None
    for chunk in bound.stream("How is the weather?"):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls[0]["name"] == "weather"
    assert OpenAI(**settings).invoke("abc") is not None
    print("langchain-openai: ok")


main()
