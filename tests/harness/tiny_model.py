"""T0: tiny models in the Hugging Face format, written on the spot, that load in Transformers and in our engine.

`write_tiny_model` has random weights whose logits have spread; `write_scripted_model` is a real Llama whose next token
is a chosen function of the current one, so that scripted tokens need no stub in the product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, IM_START, IM_END, PAD = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (BOS, EOS, IM_START, IM_END, PAD)
VOCAB = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = tuple(
    tuple(merge.split(" "))
    for line in (
        "Ġ t|h e|i n|Ġ a|r e|o n|e r|Ġt he|a t|Ġ s|e n|o r|Ġ w|Ġ c|i s|Ġ o|i t|e s|a n|Ġ p|o u|Ġ f|e d|in g|Ġo f|Ġ b",
        "a l|Ġt o|Ġ an|Ġan d|Ġ in|a r|Ġ m|Ġ d|l l|Ġ h|o m|i c|l e|v e|Ċ Ċ|Ġ Ġ|ĠĠ ĠĠ|i on|1 2|Ã ©|s t|r o|Ġ l|Ġ n|a s",
        "Ġ e|c t|i d|Ġ g|o l|Ġ re|u r|i m",
    )
    for merge in line.split("|")
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, indexed by the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def special_id(token: str, vocab: int = VOCAB) -> int:
    """The id of one of SPECIALS in a tiny model with `vocab` tokens: they are the last ones."""
    return _merge_count(vocab) + 256 + SPECIALS.index(token)


def chain(*ids: int) -> dict[int, int]:
    """Successors that make the model say ids[1], ids[2], ... after ids[0]."""
    return dict(pairwise(ids))


def _merge_count(vocab: int) -> int:
    return max(0, min(len(_MERGES), vocab - 256 - len(SPECIALS)))


def write_tokenizer(directory: Path, *, vocab: int = VOCAB, max_len: int = 256, chat: bool = True) -> None:
    """tokenizer.json (ids 0..255 are the bytes themselves, then merges, then SPECIALS) and tokenizer_config.json."""
    merges = [(left, right) for left, right in _MERGES[: _merge_count(vocab)]]
    tokens = [*byte_alphabet(), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", config)


def write_tiny_model(
    directory: Path,
    *,
    arch: str = "llama",
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = VOCAB,
    max_len: int = 256,
    tie: bool = True,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """A random model of architecture `arch` (llama, mistral, qwen2, qwen3) in `directory`, which is returned.

    `config_overrides` replace or add keys of config.json (rope_scaling, attention_bias, intermediate_size, ...).
    """
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "torch_dtype": dtype,
        "bos_token_id": special_id(BOS, vocab),
        "eos_token_id": special_id(EOS, vocab),
    }
    if arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    if arch == "mistral":
        config |= {"sliding_window": None}
    config |= config_overrides
    _write_model(Path(directory), config, _random_weights(config, seed), dtype)
    return Path(directory)


def write_scripted_model(
    directory: Path,
    successors: Mapping[int, int],
    *,
    otherwise: int | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = VOCAB,
    max_len: int = 256,
    dtype: str = "float32",
) -> Path:
    """A Llama whose greedy next token is `successors[current]`, or `otherwise` (end of sequence when None).

    Attention and MLP run but add nothing (zero output projections); embeddings are one-hot, the untied head is the
    table.
    The margin of each choice is 0.5 x sqrt(vocab) in logits: about 9 for the default vocabulary.
    """
    hidden = vocab + vocab % 2
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": special_id(BOS, vocab),
        "eos_token_id": special_id(EOS, vocab),
        "attention_bias": False,
        "mlp_bias": False,
    }
    weights = _random_weights(config, seed=0)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["model.embed_tokens.weight"] = torch.eye(vocab, hidden)
    head = torch.zeros(vocab, hidden)
    fallback = special_id(EOS, vocab) if otherwise is None else otherwise
    for current in range(vocab):
        head[successors.get(current, fallback), current] = 0.5
    weights["lm_head.weight"] = head
    _write_model(Path(directory), config, weights, dtype)
    return Path(directory)


def _random_weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every parameter by its Hugging Face name. Layers outweigh the embedding, so greedy text does not repeat."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * std

    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    query = int(config["num_attention_heads"]) * int(config["head_dim"])
    kv = int(config["num_key_value_heads"]) * int(config["head_dim"])
    weights = {
        "model.embed_tokens.weight": normal(int(config["vocab_size"]), hidden, std=0.3),
        "model.norm.weight": 1 + normal(hidden, std=0.1),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(int(config["vocab_size"]), hidden, std=0.3)
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, int, float, bool]] = {  # rows, columns, gain, bias
        "self_attn.q_proj": (query, hidden, 1.3, qkv_bias),
        "self_attn.k_proj": (kv, hidden, 1.3, qkv_bias),
        "self_attn.v_proj": (kv, hidden, 1.5, qkv_bias),
        "self_attn.o_proj": (hidden, query, 4.0, config.get("attention_bias", False)),
        "mlp.gate_proj": (inner, hidden, 1.5, config.get("mlp_bias", False)),
        "mlp.up_proj": (inner, hidden, 1.0, config.get("mlp_bias", False)),
        "mlp.down_proj": (hidden, inner, 3.0, config.get("mlp_bias", False)),
    }
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, gain, bias) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = normal(rows, columns, std=gain * columns**-0.5)
            if bias:
                weights[f"{prefix}.{name}.bias"] = normal(rows, std=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = 1 + normal(hidden, std=0.1)
        if config["model_type"] == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                weights[f"{prefix}.{name}.weight"] = 1 + normal(int(config["head_dim"]), std=0.1)
    return weights


def _write_model(directory: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    kind: torch.dtype = getattr(torch, dtype)
    state = {name: weight.to(kind).contiguous() for name, weight in weights.items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    ids: Sequence[str] = ("bos_token_id", "eos_token_id")
    _write_json(directory / "generation_config.json", {key: config[key] for key in ids})
    write_tokenizer(directory, vocab=int(config["vocab_size"]), max_len=int(config["max_position_embeddings"]))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
