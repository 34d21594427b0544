"""Text to token ids and back, for Hugging Face directories and GGUF files alike.

Two encoders share one vocabulary: one parses special tokens in the text (raw prompts, template text), the other takes
their spelling as ordinary characters (what users write in chats). Decoding works on bytes, so that streams and whole
answers agree whatever the split. All methods may be called from several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ..proto.errors import ConfigError
from . import gguf_metadata, gguf_tokenizer
from .source import ModelSource


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token as the text shows it. `strips_left`, `strips_right`: it swallows white space beside it."""

    text: str
    token_id: int
    strips_left: bool
    strips_right: bool


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the files beside the vocabulary say."""

    eos_token_ids: frozenset[int]
    bos_id: int | None
    add_bos: bool
    named: dict[str, str]  # bos_token, eos_token, ... for chat templates
    templates: dict[str, str]  # chat templates by name


class _WholeTexts(dict[int, str | None]):
    """By token id: the text of a token, "" for a special one, None where its bytes are no whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(dict.fromkeys(tokenizer.special_ids, ""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self._tokenizer.vocab_size:
            self[token_id] = text
        return text


class Tokenizer:
    """The tokenizer of one model; make it with `load`."""

    def __init__(self, parsing: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, facts: _Facts) -> None:
        self._parsing = parsing
        self._plain = plain
        self._plain.encode_special_tokens = True
        self._bytes: list[bytes | None] = [None] * parsing.get_vocab_size(with_added_tokens=True)
        self._decode_piece = _piece_decoder(parsing)
        self._added: dict[int, str] = {i: token.content for i, token in parsing.get_added_tokens_decoder().items()}
        self.specials = tuple(
            SpecialToken(token.content, i, token.lstrip, token.rstrip)
            for i, token in parsing.get_added_tokens_decoder().items()
            if token.special
        )
        self.special_ids = frozenset(special.token_id for special in self.specials)
        self.whole_texts = _WholeTexts(self)
        self.eos_token_ids = facts.eos_token_ids
        self.bos_id = facts.bos_id
        self.add_bos = facts.add_bos
        self.named_specials = facts.named
        self.chat_templates = facts.templates

    @staticmethod
    def load(source: ModelSource) -> Tokenizer:
        """The tokenizer of `source`. Raises ConfigError, naming the file or key, when it cannot be made."""
        return _load_directory(source.path) if source.kind == "huggingface" else _load_gguf(source.path)

    @property
    def vocab_size(self) -> int:
        """Tokens with a spelling; the model's own vocabulary may be padded beyond."""
        return len(self._bytes)

    def json(self) -> str:
        """The vocabulary and its rules as the text of a tokenizer.json."""
        return str(self._parsing.to_str())

    def encode(self, text: str, *, special: bool, bos: bool | None) -> list[int]:
        """Token ids of `text`.

        special: parse special tokens in the text; otherwise their spelling is ordinary text.
        bos: begin with BOS; None = as the tokenizer's own setting says.
        """
        encoder = self._parsing if special else self._plain
        # The batch call lets other Python threads run meanwhile; the plain one would hold them up for seconds.
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if (self.add_bos if bos is None else bos) and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: its spelling for a special one, nothing for an id without a token."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._parsing.id_to_token(token_id)
        return b"" if piece is None else self._decode_piece(piece)


# ---- decoding single pieces ----------------------------------------------------------------------------------


def _byte_values() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 as is, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    values = {chr(byte): byte for byte in printable}
    values.update({chr(0x100 + n): byte for n, byte in enumerate(b for b in range(256) if b not in printable)})
    return values


_BYTE_VALUES = _byte_values()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes(_BYTE_VALUES[character] for character in piece)
    except KeyError:  # a token that was put in beside the byte alphabet stands for itself
        return piece.encode()


def _sentencepiece_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _piece_decoder(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """The function from a piece to its bytes. Raises ConfigError for a decoder that does not work piece by piece."""
    state = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    decoder: dict[str, Any] = json.loads(state) if state else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_piece
    spaces = [step for step in steps if step["type"] == "Metaspace" or step.get("pattern") == {"String": "▁"}]
    if spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_piece
    raise ConfigError(f"tokenizer.json: decoder {'+'.join(sorted(kinds))} is not supported (byte-level, sentencepiece)")


# ---- loading -------------------------------------------------------------------------------------------------


def _load_gguf(path: Path) -> Tokenizer:
    metadata = gguf_metadata.read(path)
    parsing = gguf_tokenizer.build(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown")}
    for name, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ConfigError(
                f"{path}: tokenizer.ggml.{name}_token_id = {token_id}, but there are {len(tokens)} tokens"
            )
    ends = (ids[name] for name in ("eos", "eot", "eom"))
    template = metadata.get("tokenizer.chat_template")
    facts = _Facts(
        eos_token_ids=frozenset(i for i in ends if i is not None),
        bos_id=ids["bos"],
        add_bos=gguf_tokenizer.adds_bos(metadata),
        named={f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and name in ("bos", "eos")},
        templates={"default": template} if isinstance(template, str) else {},
    )
    return Tokenizer(parsing, gguf_tokenizer.build(metadata), facts)


def _load_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no tokenizer.json (a sentencepiece file alone must be converted first)")
    text = file.read_text(encoding="utf-8")
    try:
        parsing, plain = tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file}: {error}") from error
    for encoder in (parsing, plain):
        encoder.no_truncation()
        encoder.no_padding()
    config = read_json(path / "tokenizer_config.json")
    named = {key: _content(config[key]) for key in _NAMED if config.get(key) is not None}
    bos_id = parsing.token_to_id(named["bos_token"]) if "bos_token" in named else None
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):  # silent: then the post-processor decides, as it does in Transformers
        add_bos = bos_id is not None and parsing.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    if add_bos and bos_id is None:
        raise ConfigError(f"{path}/tokenizer_config.json: add_bos_token is true, but bos_token names no known token")
    facts = _Facts(_eos_ids(path, parsing, named), bos_id, add_bos, named, _templates(path, config))
    return Tokenizer(parsing, plain, facts)


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _eos_ids(path: Path, tokenizer: tokenizers.Tokenizer, named: Mapping[str, str]) -> frozenset[int]:
    """The union of what the generation config, the model's config and the tokenizer call an end of sequence."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(path / file).get("eos_token_id")
        values: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < 0]
        if wrong:
            raise ConfigError(f"{path / file}: eos_token_id holds {wrong[0]!r}, which is no token id")
        ids.update(values)
    if "eos_token" in named:
        token_id = tokenizer.token_to_id(named["eos_token"])
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja, else chat_template.json, else the key in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    value = read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value if isinstance(item, dict)}
    return {}


def _content(value: Any) -> str:
    """A token's spelling, which files give bare or as {"content": ...}."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file. Raises ConfigError, naming it, for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
