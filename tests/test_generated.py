"""The checked-in generated code is what protoc makes of the .proto files now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ibaton/proto=proto", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    made = sorted(tmp_path.rglob("*.py*"))
    assert made
    stale = [path.name for path in made if path.read_text() != (ROOT / "proto" / path.name).read_text()]
    assert stale == [], "run `make proto`"
