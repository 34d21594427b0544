"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

Two vocabularies are known: byte-level BPE ("gpt2", with the pre-tokenizers of the models we serve) and sentencepiece
("llama", whose merges follow from the scores where the file lists none). Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..proto.errors import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # ggml token types

# Regular expressions of the models' own tokenizer.json files.
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "tekken": lambda: _split(_TEKKEN),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
}
_LLAMA3_NAMES = {"llama-bpe", "llama3", "llama-v3"}
_QWEN2_NAMES = {"qwen2", "deepseek-r1-qwen"}
_WHOLE_WORDS_FIRST = {*_LLAMA3_NAMES, "tekken"}  # a word that is a token is not merged from its parts


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe. Raises ConfigError, naming key and value."""
    tokens: list[str] = _required(metadata, "tokens")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    model = _required(metadata, "model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens, kinds)
    else:
        raise ConfigError(f"tokenizer.ggml.model = {model!r} is not supported (gpt2 and llama are)")
    pairs = list(zip(tokens, kinds, strict=True))
    added = [AddedToken(t, special=False, normalized=False) for t, kind in pairs if kind == _USER_DEFINED]
    tokenizer.add_tokens(added)
    control = [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens(control)
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether prompts begin with BOS: what the file says, else what its kind of tokenizer does."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    return metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not value:
        raise ConfigError(f"the GGUF file has no tokenizer.ggml.{key}, so it holds no usable tokenizer")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    make = _PRE_TOKENIZERS.get(pre)
    if make is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"tokenizer.ggml.pre = {pre!r} is not supported (known: {known})")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_listed_merges(metadata), ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    if pre in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _required(metadata, "merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores: list[float] = _required(metadata, "scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _listed_merges(metadata) if "tokenizer.ggml.merges" in metadata else _merges_from_scores(vocab, scores)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefix = "first" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The splits of all tokens, best score first: sentencepiece BPE always makes the pair whose result scores best."""
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i], vocab[left], vocab[right], (left, right)))
    return [pair for *_, pair in sorted(merges)]
