"""What quantised weights and KV cost in quality: `.venv/bin/python benchmarks/quality.py [--kv-dtype int8 fp8]`.

The model reads a fixed text (quality.txt beside this file), in windows that each start anew. For every quantisation it
prints the perplexity of the text, how often the likeliest next token is that of bfloat16, how often it is among those
places where bfloat16's own lead over its second choice is more than ten percent, and the mean divergence
KL(bfloat16 || quantised) in nats per token. With --kv-dtype the rows are pools of these types under bfloat16 weights;
whatever a token attends to has been through the pool, tokens of its own step too.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from baton.engine.batch import BatchTensors
from baton.engine.model import Model
from baton.engine.model_config import load_config
from baton.engine.paged_kv import KV_DTYPES, PagedKV
from baton.engine.params import EngineParams, Quantization
from baton.engine.partition import head_ranges
from baton.engine.ranks import SingleRank
from baton.engine.step import SequenceStep
from baton.engine.weights import Weights
from baton.proto.kv_layout import KVLayout
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer
from torch import Tensor

TEXT = Path(__file__).with_name("quality.txt")
BLOCK = 16
LEAD = 0.1


class Reader:
    """A model with a pool for one window."""

    def __init__(self, model: str, quantization: Quantization, window: int, kv_dtype: str = "bfloat16") -> None:
        source = resolve(model)
        config = load_config(source)
        params = EngineParams(
            model_path=model,
            dtype="bfloat16",
            quantization=quantization,
            sparsity="auto",
            device="cpu",
            threads=torch.get_num_threads(),
            block_size=BLOCK,
            kv_blocks=-(-window // BLOCK),
            kv_bytes=0,
            kv_dtype=kv_dtype,
            max_model_len=None,
            batch_invariant=True,
            prefix_cache=False,
            layer_group=config.layers,
            tensor_parallel=1,
        )
        weights = Weights.open(source, config, torch.bfloat16, quantization, 0, 1, lambda done, total: None)
        self._model = Model(config, weights, params, SingleRank())
        layout = KVLayout(
            fingerprint=weights.fingerprint,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope=config.rope.describe(),
            dtype=kv_dtype,
            block_size=BLOCK,
            head_ranges=head_ranges(config.kv_heads, 1),
        )
        self._blocks = -(-window // BLOCK)
        self._kv = PagedKV(layout, 0, self._blocks, torch.device("cpu"))

    def log_probabilities(self, tokens: list[int]) -> Tensor:
        """float32 [tokens, vocabulary]: of each next token."""
        step = SequenceStep("quality", 0, 0, tokens, 0, list(range(self._blocks)), None)
        batch = BatchTensors.build([step], BLOCK, torch.device("cpu"))
        batch = dataclasses.replace(batch, logit_rows=torch.arange(len(tokens)))
        with torch.inference_mode():
            return self._model.forward(batch, self._kv, None).float().log_softmax(-1)


def main() -> None:
    """Prints a row for each quantisation, or pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--kv-dtype", nargs="+", choices=tuple(KV_DTYPES), help="of the pools to compare")
    args = parser.parse_args()
    tokens = Tokenizer.load(resolve(args.model)).encode(args.text.read_text(), special=False, bos=None)
    windows = [tokens[at : at + args.window] for at in range(0, len(tokens), args.window)]
    exact = Reader(args.model, "none", args.window)
    expected = [exact.log_probabilities(window) for window in windows]
    print(f"{args.model}: {len(tokens)} tokens of {args.text.name}, windows of {args.window}")
    if args.kv_dtype:
        report("bf16", windows, expected, expected)
        for kind in args.kv_dtype:
            pool = Reader(args.model, "none", args.window, kind)
            report(kind, windows, expected, [pool.log_probabilities(window) for window in windows])
        return
    quantizations: tuple[Quantization, ...] = ("none", "w8a8", "int4")
    for quantization in quantizations:
        reader = exact if quantization == "none" else Reader(args.model, quantization, args.window)
        report(quantization, windows, expected, [reader.log_probabilities(window) for window in windows])


def report(name: str, windows: list[list[int]], expected: list[Tensor], ours: list[Tensor]) -> None:
    """One row of the table."""
    loss = agreed = clear = clear_agreed = divergence = 0.0
    for window, exact, row in zip(windows, expected, ours, strict=True):
        best = exact.topk(2, -1).values.exp()
        same = exact.argmax(-1) == row.argmax(-1)
        leading = best[:, 0] - best[:, 1] > LEAD
        agreed += float(same.sum())
        clear += float(leading.sum())
        clear_agreed += float((same & leading).sum())
        divergence += float((exact.exp() * (exact - row)).sum())
        loss -= float(row[:-1].gather(1, torch.tensor(window[1:])[:, None]).sum())
    count = sum(map(len, windows))
    perplexity = torch.tensor(loss / (count - len(windows))).exp()
    print(
        f"{name:5} perplexity {perplexity:7.3f}, top-1 {agreed / count:6.2%}, with a clear lead "
        f"{clear_agreed / clear:6.2%}, divergence {divergence / count:.4f} nats"
    )


if __name__ == "__main__":
    main()
