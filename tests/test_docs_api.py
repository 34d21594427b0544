"""The Python example of docs/api.md runs as it is printed, but for the address."""

from __future__ import annotations

import re
import sys
from asyncio import create_subprocess_exec, subprocess
from pathlib import Path

from baton.proto import baton_pb2 as api
from baton.tests.harness.router_rig import router_rig

DOCS = Path(__file__).resolve().parent.parent / "docs" / "api.md"


async def test_the_python_example(tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "baton" in block]
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        program = code.replace("127.0.0.1:50051", rig.addresses["grpc"])
        pipe = subprocess.PIPE
        process = await create_subprocess_exec(
            sys.executable, "-W", "error", "-c", program, stdout=pipe, stderr=subprocess.STDOUT
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    first, second, *rest = said.decode().splitlines()
    assert first == "hello"
    assert second.startswith("hello prompt_tokens: ")
    assert "hello ['tiny']" in rest[-1]


def test_every_field_is_explained() -> None:
    text = DOCS.read_text()
    messages = (api.GenerateRequest, api.GenerateBatchRequest, api.Failure, api.TokenChunk, api.Finished, api.Usage)
    missing = [field.name for message in messages for field in message.DESCRIPTOR.fields if field.name not in text]
    methods = [name for name in api.DESCRIPTOR.services_by_name["Baton"].methods_by_name if name not in text]
    assert missing + methods == []
