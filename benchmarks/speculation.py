"""What speculation gains, and that it changes nothing: `.venv/bin/python benchmarks/speculation.py`.

The bundled SmolLM2-135M decodes greedily on one core, without speculation, by prompt lookup and with its int4 copy as
a draft model, in turns within each repeat. "copying" asks for a text to be repeated word by word, "free" for a story. A
row says the batch, tokens a second of decoding (the call with one token is taken off), tokens of a sequence in a step,
and the accepted part of what was proposed. It ends with an error if a row's tokens differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from baton.engine.block_pool import BlockPool
from baton.engine.draft_model import DraftModel
from baton.engine.local import LocalEngine
from baton.engine.params import EngineParams, Quantization, SpeculationParams
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.speculation import Speculator
from baton.engine.speculation_start import draft_costs, start_speculation
from baton.engine.step import DRAWN_BY_LEADER
from baton.text.chat_template import ChatTemplate
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
PARAGRAPHS = Path(__file__).with_name("quality.txt").read_text().split("\n\n")[2:4]
ASKED = {
    "copying": [f"Repeat this text word by word:\n\n{text}" for text in PARAGRAPHS],
    "free": ["Tell me a long story about a fisherman.", "Explain why the sky is blue, to a child."],
}


def params(quantization: Quantization) -> EngineParams:
    """One core, bfloat16 or weights of fewer bits."""
    return EngineParams(
        model_path=MODEL,
        dtype="bfloat16",
        quantization=quantization,
        sparsity="auto",
        device="cpu",
        threads=1,
        block_size=16,
        kv_blocks=1024,
        kv_bytes=0,
        kv_dtype="auto",
        max_model_len=None,
        batch_invariant=True,
        prefix_cache=False,
        layer_group=30,
        tensor_parallel=1,
    )


def load(quantization: Quantization) -> Runner:
    runner = Runner(params(quantization), SingleRank(), lambda done, total: None, None)
    runner.warm_up()
    return runner


def speculators(runner: Runner, longest: int) -> dict[str, Speculator | None]:
    """By name, each as a worker would start it."""
    draft = load("int4")
    costs = draft_costs(runner, draft, longest)
    lookup = SpeculationParams("prompt_lookup", longest, "", 0)
    return {
        "none": None,
        "prompt_lookup": start_speculation(lookup, params("none"), runner),
        "draft": Speculator(DraftModel(draft, runner.vocab_size), costs, longest, 16),
    }


def timed(
    runner: Runner, speculator: Speculator | None, prompts: Sequence[list[int]], new: int
) -> tuple[float, object]:
    """Seconds, and all token ids."""
    engine = LocalEngine(runner, BlockPool(runner.blocks, 16, False), runner.kv.copy_blocks, speculator)
    sampling = replace(DRAWN_BY_LEADER.params, max_tokens=new)
    started = time.perf_counter()
    answers = engine.generate([(prompt, sampling) for prompt in prompts], sum(map(len, prompts)), len(prompts))
    return time.perf_counter() - started, [choice.token_ids for (choice,) in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=8, help="proposals of a step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runner = load("none")
    template = ChatTemplate(Tokenizer.load(resolve(MODEL)))
    sides = speculators(runner, options.max_tokens)
    print(f"costs: { ({name: side.costs for name, side in sides.items() if side}) }")
    for kind, texts in ASKED.items():
        for batch in options.batches:
            prompts = [template.render_ids([{"role": "user", "content": texts[i % len(texts)]}]) for i in range(batch)]
            compare(kind, runner, sides, prompts, options.tokens, options.repeats)


def compare(
    kind: str,
    runner: Runner,
    sides: dict[str, Speculator | None],
    prompts: Sequence[list[int]],
    tokens: int,
    repeats: int,
) -> None:
    """One row for each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    before = {name: (s.drafts, s.draft_tokens, s.accepted_tokens) for name, s in sides.items() if s}
    for _ in range(repeats):
        said: dict[str, object] = {}
        for name, side in sides.items():
            first, _ = timed(runner, side, prompts, 1)
            whole, said[name] = timed(runner, side, prompts, tokens)
            seconds[name].append(whole - first)
        if any(answer != said["none"] for answer in said.values()):
            raise SystemExit(f"{kind}, batch {len(prompts)}: the tokens differ")
    base = statistics.median(seconds["none"])
    for name, side in sides.items():
        took, note = statistics.median(seconds[name]), ""
        if side is not None:
            drafts, proposed, accepted = (
                now - then
                for now, then in zip((side.drafts, side.draft_tokens, side.accepted_tokens), before[name], strict=True)
            )
            note = f"  accepted {accepted}/{proposed}, {1 + accepted / max(drafts, 1):.2f} tokens a step with proposals"
        rate = len(prompts) * (tokens - 1) / took
        print(f"{kind:8} batch {len(prompts):2}  {name:13} {rate:7.1f} tokens/s  {base / took:5.2f}x{note}", flush=True)


if __name__ == "__main__":
    main()
