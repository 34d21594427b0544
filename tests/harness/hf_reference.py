"""Hugging Face Transformers as the oracle: greedy tokens with the margin of each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

TIE = 3e-4  # two logits closer than this may be ordered either way (docs/architecture.md)


@dataclass(frozen=True)
class Greedy:
    """What the reference says: token ids, and for each the distance of its logit from the runner-up's."""

    token_ids: list[int]
    margins: list[float]


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a Hugging Face directory or a .gguf file, through Transformers' own loaders."""
    folder, file = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    model.generation_config.eos_token_id = None  # `greedy` is told
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt_ids: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> Greedy:
    """Greedy continuation of `prompt_ids`; the stop id that ended it is included."""
    inputs = torch.tensor([list(prompt_ids)])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = [logits[0].float().topk(2).values for logits in output.logits]
    return Greedy(output.sequences[0, len(prompt_ids) :].tolist(), [float(top[0] - top[1]) for top in tops])


def difference(ours: Sequence[int], reference: Greedy) -> str:
    """Empty when `ours` are the same tokens; else where and how they part. A tie in the reference ends it."""
    for index, (mine, theirs, margin) in enumerate(zip(ours, reference.token_ids, reference.margins, strict=False)):
        if mine != theirs:
            return "" if margin < TIE else f"token {index}: {mine} instead of {theirs}, margin {margin:.2e}"
    if len(ours) != len(reference.token_ids):
        return f"{len(ours)} tokens instead of {len(reference.token_ids)}"
    return ""
