"""What the planner must know of a model: its sizes, from the catalogue, a config.json of any family, or a GGUF file.

Unlike `engine/model_config.py` this refuses no architecture: a model can be planned for before it can be run.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...proto.errors import ConfigError
from ...text import gguf_metadata
from ...text.source import resolve

CATALOGUE = Path(__file__).resolve().parent.parent.parent / "configs" / "models"


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated or plain MLPs, dense or with experts. Sizes are numbers of elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of a dense MLP, or of one expert
    vocab_size: int
    tied: bool = False  # the head is the embedding
    gated: bool = True  # three matrices in an MLP; False: two
    experts: int = 1  # in each layer, routed
    active_experts: int = 1  # that a token goes through
    shared_intermediate: int = 0  # of experts that every token goes through
    parameters: float | None = None  # as the model's makers count, where that differs from what the sizes give
    latent: int = 0  # elements of KV per token and layer of latent attention (MLA); 0: 2 * kv_heads * head_dim

    @property
    def mlp_weights(self) -> int:
        """Of one expert (or of the dense MLP) in one layer."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def attention_weights(self) -> int:
        """Of the four projections in one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def shared_weights(self) -> int:
        """Of experts that all tokens go through, in one layer."""
        return (3 if self.gated else 2) * self.hidden * self.shared_intermediate

    @property
    def total(self) -> float:
        """Parameters that are held in memory."""
        if self.parameters is not None:
            return self.parameters
        layer = self.attention_weights + self.experts * self.mlp_weights + self.shared_weights
        return float(self.layers * layer + self.vocab_size * self.hidden * (1 if self.tied else 2))

    @property
    def looked_up(self) -> float:
        """Parameters of an embedding that is not the head too: one row of it is read for a token."""
        return 0.0 if self.tied else float(self.vocab_size * self.hidden)

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, the head included."""
        idle = self.layers * (self.experts - self.active_experts) * self.mlp_weights
        return self.total - idle - self.looked_up

    def touched(self, tokens: float) -> float:
        """Parameters that a step of so many tokens reads, on average.

        Experts are drawn independently: a token leaves one out with 1 - active/experts (the coupon collector's mean).
        """
        left = float((1 - self.active_experts / self.experts) ** tokens)
        return self.total - self.looked_up - self.layers * self.experts * self.mlp_weights * left

    @property
    def kv_elements(self) -> int:
        """Per token, all layers: keys and values of every KV head (GQA: fewer than query heads)."""
        return self.layers * (self.latent or 2 * self.kv_heads * self.head_dim)


def find(name: str, folder: Path) -> Shape:
    """The model that a configuration names: a file of sizes (.yaml) or a config.json beside it, a directory, a GGUF
    file, a bundled name, or a name of the catalogue. Raises ConfigError."""
    beside = folder / Path(name).expanduser()
    if beside.is_file() and beside.suffix in (".yaml", ".yml"):
        return _from_yaml(beside)
    if beside.is_file() and beside.suffix == ".json":
        return _from_json(beside)
    if beside.is_dir() and (beside / "config.json").is_file():
        return _from_json(beside / "config.json")
    listed = CATALOGUE / f"{name}.yaml"
    if not beside.exists() and listed.is_file():
        return _from_yaml(listed)
    try:
        source = resolve(str(beside) if beside.exists() else name)
    except ConfigError as error:
        known = sorted(entry.stem for entry in CATALOGUE.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise ConfigError(f"{error}; nor is it in the planner's catalogue: {hint}") from None
    return _from_gguf(source.path)


def _from_yaml(path: Path) -> Shape:
    try:
        fields = yaml.safe_load(path.read_text())
        fields.pop("source", None)
        shape = Shape(name=path.stem, **fields)
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from None
    return _checked(shape, path)


def _checked(shape: Shape, path: Path) -> Shape:
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "experts"):
        value = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"model.path: {path}: {name} is {value!r}, but must be a whole number of at least 1")
    if not 1 <= shape.active_experts <= shape.experts:
        raise ConfigError(f"model.path: {path}: active_experts is {shape.active_experts} of {shape.experts}")
    return shape


def _from_json(path: Path) -> Shape:
    """Field names as Transformers writes them; those of a text part where the model has several."""
    try:
        outer: dict[str, Any] = json.loads(path.read_text())
        fields = outer.get("text_config") or outer
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        experts = next((fields[key] for key in _EXPERTS if fields.get(key)), 1)
        expert = fields.get("moe_intermediate_size") if experts > 1 else None
        shared = fields.get("shared_expert_intermediate_size") or (fields.get("n_shared_experts") or 0) * (expert or 0)
        latent = (fields.get("kv_lora_rank") or 0) + (fields.get("qk_rope_head_dim") or 0)
        shape = Shape(
            name=path.parent.name,
            layers=fields["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or hidden // heads,
            intermediate=expert or fields.get("intermediate_size") or fields.get("ffn_dim") or 4 * hidden,
            vocab_size=fields["vocab_size"],
            tied=bool(fields.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            gated=fields.get("hidden_act", fields.get("activation_function", "silu"))
            not in ("relu", "gelu", "gelu_new"),
            experts=experts,
            active_experts=fields.get("num_experts_per_tok", 1) if experts > 1 else 1,
            shared_intermediate=shared if experts > 1 else 0,
            latent=latent if fields.get("kv_lora_rank") else 0,
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"model.path: {path}: {error.args[0]} is missing") from None
    return _checked(shape, path)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _from_gguf(path: Path) -> Shape:
    header = gguf_metadata.read_header(path)
    data = header.metadata
    arch = data.get("general.architecture", "")

    def size(key: str, default: int | None = None) -> int:
        value = data.get(f"{arch}.{key}", default)
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, int):
            raise ConfigError(f"model.path: {path}: {arch}.{key} is missing")
        return value

    heads, hidden = size("attention.head_count"), size("embedding_length")
    shapes = {entry.name: entry.shape for entry in header.tensors}
    experts = size("expert_count", 0) or 1
    shape = Shape(
        name=path.stem,
        layers=size("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=size("attention.key_length", hidden // heads),
        intermediate=size("expert_feed_forward_length", size("feed_forward_length")),
        vocab_size=size("vocab_size", shapes.get("token_embd.weight", (hidden, 0))[-1]),
        tied="output.weight" not in shapes,
        experts=experts,
        active_experts=size("expert_used_count", 1) if experts > 1 else 1,
    )
    return _checked(shape, path)
