"""Generates with vLLM's CPU build, for benchmarks/engine.py; runs in vLLM's own Python and needs nothing of ours.

    VLLM_CPU_OMP_THREADS_BIND=0 PYTHON benchmarks/engine_peers.py MODEL_DIR MAX_SEQUENCES MAX_TOKENS

Says {"ready": VERSION}, then answers each line {"prompts": [[ids], ...], "new": tokens for each} on standard input with
{"seconds": of the whole call} on standard output. Greedy, bfloat16, no prefix cache, no end of sequence.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def load(model: str, sequences: int, tokens: int) -> Any:
    """The engine, with room for `sequences` sequences of `tokens` tokens."""
    from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

    return LLM(model, dtype="bfloat16", max_num_seqs=sequences, max_model_len=tokens, enable_prefix_caching=False)


def generate(engine: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds of one call. Raises RuntimeError when a request did not get all its tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    took = time.perf_counter() - started
    if any(len(answer.outputs[0].token_ids) != new for answer in answers):
        raise RuntimeError("a request ended early")
    return took


def main() -> None:
    """Serve standard input until it ends."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    model, sequences, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = load(model, sequences, tokens)
    from vllm import __version__

    print(json.dumps({"ready": f"vLLM {__version__}"}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"seconds": generate(engine, order["prompts"], order["new"])}), file=answers)


if __name__ == "__main__":
    main()
