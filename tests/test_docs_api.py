"""docs/api.md is true: its Python example runs as it is printed, and the tests that docs/testing.md names exist."""

from __future__ import annotations

import ast
import re
import sys
from asyncio import create_subprocess_exec, subprocess
from pathlib import Path

from baton.proto import baton_pb2 as api
from baton.tests.harness.router_rig import router_rig

TESTS = Path(__file__).resolve().parent
DOCS, TESTING = TESTS.parent / "docs" / "api.md", TESTS.parent / "docs" / "testing.md"


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


def test_the_tests_of_the_cases_over_grpc_exist() -> None:
    """The table of docs/testing.md."""
    rows = re.findall(r"^\| gRPC ((?:API|ST)-\d\d) \|[^|]*\|([^|]*)\|$", TESTING.read_text(), re.MULTILINE)
    assert [case for case, _ in rows] == [f"{kind}-{number:02}" for kind in ("API", "ST") for number in range(1, 11)]
    for case, cell in rows:
        named = re.findall(r"`(\w+)::(\w+)`", cell)
        assert named, case
        for module, name in named:
            functions = ast.parse((TESTS / f"{module}.py").read_text()).body
            assert name in {f.name for f in functions if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}, name


def test_every_field_is_explained() -> None:
    text = DOCS.read_text()
    messages = (api.GenerateRequest, api.GenerateBatchRequest, api.Failure, api.TokenChunk, api.Finished, api.Usage)
    missing = [field.name for message in messages for field in message.DESCRIPTOR.fields if field.name not in text]
    methods = [name for name in api.DESCRIPTOR.services_by_name["Baton"].methods_by_name if name not in text]
    assert missing + methods == []
