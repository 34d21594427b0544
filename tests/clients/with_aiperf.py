"""aiperf against a running server, over both endpoints: python with_aiperf.py URL FOLDER_OF_THE_MODEL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUESTS, INPUT, OUTPUT = 20, 64, 12
COMMON = ("--streaming", "--request-count", str(REQUESTS), "--concurrency", "4", "--warmup-request-count", "2")
QUIET = ("--ui", "none", "--workers-max", "1", "--record-processors", "1", "--random-seed", "1")
LENGTHS = (
    *("--synthetic-input-tokens-mean", str(INPUT), "--synthetic-input-tokens-stddev", "0"),
    *("--output-tokens-mean", str(OUTPUT), "--output-tokens-stddev", "0"),
    *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{OUTPUT}", "--use-server-token-count"),
)


def profile(endpoint: str, url: str, model: str, folder: str) -> Any:
    """One run; its summary."""
    tool = Path(sys.executable).with_name("aiperf")
    # it refuses a local tokenizer while the hub is off, and asks the hub nothing when it has one
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [str(tool), "profile", "--model", model, "--url", url, "--endpoint-type", endpoint, "--tokenizer", folder]
    with tempfile.TemporaryDirectory() as scratch:
        command += [*COMMON, *QUIET, *LENGTHS, "--artifact-dir", scratch]
        done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True, check=False)
        found = list(Path(scratch).rglob("profile_export_aiperf.json"))
        if done.returncode or not found:
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        return json.loads(found[0].read_text())


def main(url: str, model: str, folder: str) -> None:
    for endpoint in ("chat", "completions"):
        summary = profile(endpoint, url, model, folder)
        said = {name: (summary.get(name) or {}).get("avg") for name in ("request_count", "output_sequence_length")}
        errors = (summary.get("error_request_count") or {}).get("avg") or 0
        assert (said["request_count"], said["output_sequence_length"], errors) == (REQUESTS, OUTPUT, 0), summary
        latency = {name: round(summary[name]["avg"], 2) for name in ("time_to_first_token", "inter_token_latency")}
        print(f"aiperf {endpoint}: {REQUESTS} requests of {OUTPUT} tokens, no error, {latency} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1].removesuffix("/v1"), "tiny", sys.argv[2])
