"""From a file and `--set` overrides to a checked Config: every mistake in one pass, each with key, value, line and a
suggestion; and `--print-config`.

Precedence: `--set` beats the file, the file beats the defaults of config.py. The environment is not read.
"""

from __future__ import annotations

import copy
import difflib
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..proto.errors import ConfigError
from . import config_checks, hardware, yaml_tree
from .config import Config
from .units import Unit
from .yaml_tree import Problem, Tree

_PLACEHOLDER = "-"  # stands in for a required value that is wrong, so that the other checks still run


def load(path: str, settings: list[str]) -> Config:
    """The configuration in the file `path` under the overrides. Raises ConfigError with every mistake found."""
    place = Path(path)
    if place.is_dir() or not place.exists():
        raise ConfigError(f"{path}: no such file{_near_file(place)}")
    tree = yaml_tree.read(place)
    yaml_tree.override(tree, settings)
    config = build(tree, place.resolve().parent)
    hardware.find(config)
    return config


def build(tree: Tree, folder: Path) -> Config:
    """The configuration that the tree describes. Raises ConfigError with every mistake found."""
    problems = list(tree.problems)
    values = copy.deepcopy(tree.values)
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as errors:
        details = errors.errors()
        problems += _problems(tree, details)
        config = _without_mistakes(values, details)
    if config is not None:
        wrong = {problem.key for problem in problems}
        found = config_checks.mistakes(config.located(folder, tree.origins, {}))
        problems += [Problem(key, text, tree.origins.get(key, "")) for key, text in found.items() if key not in wrong]
    if problems or config is None:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    return config.located(folder, tree.origins, yaml_tree.flatten(tree.values))


def _near_file(place: Path) -> str:
    if place.is_dir():
        return " (it is a directory)"
    here = place.parent if place.parent.is_dir() else Path()
    near = difflib.get_close_matches(place.name, [p.name for p in here.glob("*.y*ml")], n=1)
    return f"; did you mean {here / near[0]}?" if near else ""


# ---- schema walk ------------------------------------------------------------------------------------------------


def _section(annotation: object) -> type[BaseModel] | None:
    """The section that a field is, or may be."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return found[0] if found else None


def sections(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with its dotted prefix ("" for the root, "kv." and so on)."""
    yield prefix, model
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}{name}.")


def keys() -> list[str]:
    """Every dotted key of the schema, sections included."""
    return [prefix + name for prefix, model in sections() for name in model.model_fields]


# ---- pydantic's errors in our words -----------------------------------------------------------------------------


def _problems(tree: Tree, details: list[ErrorDetails]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for detail in details:
        key = _key(detail)
        if key not in found:  # a union reports each of its members
            found[key] = Problem(key, _explain(key, detail, details), _origin(tree, key))
    return list(found.values())


def _key(detail: ErrorDetails) -> str:
    """The dotted key, without the names that pydantic adds for the members of a union."""
    known = set(keys())
    parts = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return ".".join(parts)
    while len(parts) > 1 and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def _origin(tree: Tree, key: str) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        where = tree.origins.get(".".join(parts[:length]))
        if where:
            return where
    return ""


def _explain(key: str, detail: ErrorDetails, details: list[ErrorDetails]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_near_key(key)}"
    if kind == "missing":
        return "is missing" + (" (for example smollm2-135m-instruct)" if key in ("model", "model.path") else "")
    shown = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    if kind in ("model_type", "model_attributes_type"):
        return f"is a section with keys of its own, not {shown if value is not None else 'empty'}"
    if value is None:
        return "is empty (null); leave the key out for its default"
    wants = [_want(other) for other in details if _key(other) == key]
    return f"is {shown}, but {' or '.join(dict.fromkeys(wants))}{_near_value(value, key, detail)}"


def _want(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    words = {
        "int_type": "must be a whole number without quotes",
        "float_type": "must be a number without quotes",
        "bool_type": "must be true or false",
        "string_type": "must be text (in quotes)",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "literal_error": f"must be {str(context.get('expected', '')).replace(chr(39), '')}",
        "string_too_short": "must not be empty text",
    }
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    return words.get(kind, detail["msg"])


def _near_key(key: str) -> str:
    """The nearest right key: first among the neighbours, then the same name elsewhere."""
    prefix, _, name = key.rpartition(".")
    models = dict(sections())
    neighbours = list(models[f"{prefix}." if prefix else ""].model_fields)
    near = difflib.get_close_matches(name, neighbours, n=1, cutoff=0.6)
    if not near:  # `blok` for block_size
        words = {word: neighbour for neighbour in neighbours for word in neighbour.split("_")}
        near = [words[word] for word in difflib.get_close_matches(name, words, n=1, cutoff=0.75)]
    if near:
        return f"; did you mean {(prefix + '.') if prefix else ''}{near[0]}?"
    elsewhere = [other for other in keys() if other.rpartition(".")[2] == name]
    if not elsewhere:
        names = difflib.get_close_matches(name, {other.rpartition(".")[2] for other in keys()}, n=1, cutoff=0.8)
        elsewhere = [other for other in keys() if names and other.rpartition(".")[2] == names[0]]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; {prefix or 'the file'} may hold {', '.join(neighbours)}"


def _near_value(value: object, key: str, detail: ErrorDetails) -> str:
    if detail["type"] != "literal_error" or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, _choices(key), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _choices(key: str) -> list[str]:
    prefix, _, name = key.rpartition(".")
    annotation: Any = dict(sections())[f"{prefix}." if prefix else ""].model_fields[name].annotation
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return [str(choice) for member in members for choice in typing.get_args(member) if isinstance(choice, str)]


def _without_mistakes(values: dict[str, Any], details: list[ErrorDetails]) -> Config | None:
    """The configuration with defaults in place of every wrong value, so that cross checks can run as well."""
    for detail in details:
        parts = _key(detail).split(".")
        at: Any = values
        for part in parts[:-1]:
            at = at.get(part) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at.pop(parts[-1], None)
    model = values.setdefault("model", {})
    model.setdefault("path", _PLACEHOLDER)
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None


# ---- printing ---------------------------------------------------------------------------------------------------


def show(config: Config) -> str:
    """The whole configuration as YAML, each value with a comment that says where it comes from."""
    lines: list[str] = []
    _show_section(config, config, "", lines)
    return "\n".join(lines)


def _show_section(config: Config, section: BaseModel, prefix: str, lines: list[str]) -> None:
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), prefix + name
        if isinstance(value, BaseModel):
            lines.append(f"{indent}{name}:")
            _show_section(config, value, f"{key}.", lines)
            continue
        units = [extra for extra in field.metadata if isinstance(extra, Unit)]
        if key in config.raw:
            value = config.raw[key]
        elif units and value is not None:
            value = units[0].show(value)
        text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("\n...\n").strip()
        lines.append(f"{indent}{name}: {text}".ljust(48) + f"  # {config.origins.get(key, 'default')}")
