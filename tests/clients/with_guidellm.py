"""guidellm against a running server, over both endpoints: python with_guidellm.py URL FOLDER_OF_THE_MODEL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUESTS, INPUT, OUTPUT = 20, 64, 12


def run(endpoint: str, url: str, model: str, folder: str) -> Any:
    """One run; its only benchmark."""
    tool = Path(sys.executable).with_name("guidellm")
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(str(tool), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model={model},request_format={endpoint}"),
            *("--tokenizer", f"kind=hf_auto,model={folder}", "--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={scratch}/out.json"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True, check=False)
        out = Path(scratch) / "out.json"
        if done.returncode or not out.exists():
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        return benchmark


def main(url: str, model: str, folder: str) -> None:
    for endpoint in ("/v1/chat/completions", "/v1/completions"):
        metrics = run(endpoint, url, model, folder)["metrics"]
        totals = metrics["request_totals"]
        assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
        tokens = metrics["output_token_count"]["successful"]["mean"]
        assert tokens == OUTPUT, metrics["output_token_count"]
        ttft = metrics["time_to_first_token_ms"]["successful"]["mean"]
        print(f"guidellm {endpoint}: {REQUESTS} requests of {OUTPUT} tokens, no error, TTFT {ttft:.1f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1].removesuffix("/v1"), "tiny", sys.argv[2])
