"""Real clients, unmodified, and a fuzzer against a running `baton serve`: `make clients`.

    python -m baton.tests.clients.run --python .venv-clients/bin/python [--calls 10000] [openai langchain litellm fuzz]

The clients live in an environment of their own; the cluster is T0 with a chat template that takes tools. After each
client nothing may be left behind (O-live, O-pool, O-acct).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.test_system_openai import TEMPLATE

HERE = Path(__file__).resolve().parent
CLIENTS = ("openai", "langchain", "litellm", "fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of the environment with the clients")
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
                code = fuzz(rig, options) if client == "fuzz" else check(rig, options.python, client)
                rig.quiesce(30)
                print(f"{client}: {'failed' if code else 'ok'}, {time.monotonic() - began:.1f} s", flush=True)
                failed += [client] if code else []
    return 1 if failed else 0


def check(rig: Rig, python: str, client: str) -> int:
    """One of the scripts beside this one."""
    command = [python, str(HERE / f"with_{client}.py"), rig.http + "/v1"]
    return subprocess.run(command, timeout=600, check=False).returncode


def fuzz(rig: Rig, options: argparse.Namespace) -> int:
    """Schemathesis over the document that the server gives out: no answer 5xx but 503, none that takes too long."""
    tool = Path(options.python).with_name("schemathesis")
    operations = 18
    command = [
        *(
            str(tool),
            "run",
            f"{rig.http}/openapi.json",
            "--phases",
            "fuzzing",
            "--mode",
            "all",
            "--seed",
            str(options.seed),
        ),
        *("--checks", "not_a_server_error", "--max-response-time", "20", "--request-timeout", "30"),
        *("--max-examples", str(-(-options.calls // operations)), "--suppress-health-check", "all"),
        *("--continue-on-failure", "--no-color", "--generation-database", "none"),
    ]
    return subprocess.run(command, timeout=3 * 3600, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
