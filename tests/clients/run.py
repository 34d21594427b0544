"""Real clients, unmodified, and a fuzzer against a running `baton serve`: `make clients`.

    python -m baton.tests.clients.run --environments .venv-clients [--calls 10000] [openai langchain litellm ...]

The clients live in environments of their own: those of Python share one, load generators have each one. The cluster is
T0 with a chat template that takes tools. After each client nothing may be left behind (O-live, O-pool, O-acct).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.test_system_openai import TEMPLATE

HERE = Path(__file__).resolve().parent
CLIENTS = ("openai", "langchain", "litellm", "aiperf", "guidellm", "fuzz")
ALONE = {"aiperf", "guidellm"}  # whose dependencies are those of nobody else


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", required=True, type=Path, help="folder of python, aiperf and guidellm")
    parser.add_argument("--calls", type=int, default=10_000, help="of the fuzzer")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer")
    parser.add_argument("clients", nargs="*", default=list(CLIENTS), help=f"of {', '.join(CLIENTS)}")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "tiny", max_len=512)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        changes = {
            "pools.decode.memory": 1024 * 2048,
            "pools.prefill.memory": 1024 * 2048,
            "router.batches": {"folder": str(Path(scratch) / "batches"), "files": 100_000},
        }
        with running(Path(scratch) / "cluster", merged(tiny_config(model), changes)) as rig:
            for client in options.clients:
                began = time.monotonic()
                home = options.environments / (client if client in ALONE else "python") / "bin"
                code = fuzz(rig, home, options, scratch) if client == "fuzz" else check(rig, home, client, model)
                rig.quiesce(30)
                print(f"{client}: {'failed' if code else 'ok'}, {time.monotonic() - began:.1f} s", flush=True)
                failed += [client] if code else []
    return 1 if failed else 0


def check(rig: Rig, home: Path, client: str, model: Path) -> int:
    """One of the scripts beside this one, with the Python in `home`."""
    command = [str(home / "python"), str(HERE / f"with_{client}.py"), rig.http + "/v1", str(model)]
    return subprocess.run(command, timeout=600, check=False).returncode


def fuzz(rig: Rig, home: Path, options: argparse.Namespace, scratch: str) -> int:
    """Schemathesis over the document that the server gives out: no answer 5xx but 503, none that takes too long."""
    tool = home / "schemathesis"
    known = Path(scratch) / "schemathesis.toml"
    known.write_text(_known(rig))
    document = httpx.get(f"{rig.http}/openapi.json", trust_env=False).json()
    operations = sum(len(methods) for methods in document["paths"].values())
    command = [
        *(str(tool), "--config-file", str(known), "run", f"{rig.http}/openapi.json"),
        *("--phases", "fuzzing", "--mode", "all", "--seed", str(options.seed)),
        *("--checks", "not_a_server_error", "--max-response-time", "20", "--request-timeout", "30"),
        *("--max-examples", str(-(-options.calls // operations)), "--suppress-health-check", "all"),
        *("--continue-on-failure", "--no-color", "--generation-database", "none"),
    ]
    return subprocess.run(command, timeout=3 * 3600, check=False).returncode


def _known(rig: Rig) -> str:
    """A configuration with ids of a file and a batch that exist, for whoever only reads them."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 3}}
    with httpx.Client(base_url=rig.http, trust_env=False) as http:
        form = {"file": ("in.jsonl", json.dumps(line))}
        file_id = http.post("/v1/files", files=form, data={"purpose": "batch"}).raise_for_status().json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    ids = {"GET /v1/files/{file_id}": ("file_id", file_id), "GET /v1/files/{file_id}/content": ("file_id", file_id)}
    ids |= {"GET /v1/batches/{batch_id}": ("batch_id", batch_id)}
    ids |= {"POST /v1/batches/{batch_id}/cancel": ("batch_id", batch_id)}
    blocks = [
        f'[[operations]]\ninclude-name = "{name}"\nparameters = {{ "path.{key}" = "{value}" }}\n'
        for name, (key, value) in ids.items()
    ]
    return "\n".join(blocks)


if __name__ == "__main__":
    sys.exit(main())
