"""`litellm` against a server: `python with_litellm.py http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import
import litellm

MESSAGES = [{"role": "user", "content": "Say something."}]
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


def main() -> None:
    ask = {"model": "hosted_vllm/tiny", "api_base": sys.argv[1], "api_key": "none", "messages": MESSAGES}
    answer = litellm.completion(**ask, max_tokens=8, temperature=0, top_k=5, seed=1)
    assert answer.usage.completion_tokens > 0
    parts = list(litellm.completion(**ask, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert any(getattr(part, "usage", None) for part in parts)
    fields = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = litellm.completion(**ask, max_tokens=60, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content)) == {"a"}
    answer = litellm.completion(**ask, max_tokens=60, tools=[TOOL], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "now"
    answer = asyncio.run(litellm.acompletion(**ask, max_tokens=4))
    assert answer.choices
    del ask["messages"]
    text = litellm.text_completion(**ask, prompt="a", max_tokens=3)
    assert text.choices
    print("litellm: ok")


main()
