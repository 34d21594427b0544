"""Which tensors a checkpoint must have: every parameter of the model exactly once, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..proto.errors import ConfigError
from .model_config import ModelConfig
from .tensor_store import TensorStore

# Left by old converters: recomputed from the configuration, or already part of it.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_freqs\.weight")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model with its shape."""
    hidden, inner = config.hidden, config.intermediate
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    linears: Iterable[tuple[str, int, int, bool]] = (
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", kv, hidden, config.attention_bias),
        ("self_attn.v_proj", kv, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                shapes[f"{prefix}{norm}.weight"] = (config.head_dim,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_tensors(config: ModelConfig, store: TensorStore) -> None:
    """Raises ConfigError naming the tensors that are missing, misshapen, or not the model's."""
    wanted, found = expected(config), store.tensors
    redundant = {HEAD} if config.tied else set()
    missing = sorted(set(wanted) - set(found))
    extra = sorted(name for name in set(found) - set(wanted) - redundant if not _IGNORED.fullmatch(name))
    shapes = [
        f"{name} is {list(found[name].shape)}, must be {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and found[name].shape != shape
    ]
    problems = [
        f"{title}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        for title, names in (("missing tensors", missing), ("unexpected tensors", extra), ("wrong shapes", shapes))
        if names
    ]
    if HEAD in missing:
        problems.append("(tie_word_embeddings is false, so the head must be there)")
    if problems:
        where = next(iter(found.values())).file if found else "the checkpoint"
        raise ConfigError(f"{where}: {'; '.join(problems)}")
