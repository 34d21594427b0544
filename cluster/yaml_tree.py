"""A YAML file as plain values with the line of each key: safe scalars only, duplicates found, `--set` laid over it.

Scalars follow YAML 1.2: `yes`, `on` and `1:30` are text, so a slip is reported instead of becoming `true` or 90.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..proto.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One mistake: the dotted key, what is wrong, and where."""

    key: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.key}: {self.text}" if self.key else f"{place}{self.text}"


@dataclass
class Tree:
    """Nested dicts of plain values, and for each dotted key where it was written."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text: str, name: str) -> Tree:
    """The file's values. Raises ConfigError where it is no YAML or no mapping; duplicate keys become problems."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        tree = Tree({})
        if node is None:
            return tree
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{name}:{node.start_mark.line + 1}: expected sections such as `model:`, not a plain value"
            )
        tree.values = _mapping(loader, node, name, "", tree, (node,))
        return tree
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        raise ConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()


def _mapping(
    loader: _Loader, node: yaml.MappingNode, name: str, prefix: str, tree: Tree, above: tuple[yaml.Node, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            tree.problems.append(Problem(prefix.rstrip("."), "a key must be plain text", where))
            continue
        key = str(key_node.value)
        dotted = prefix + key
        if key in values:
            tree.problems.append(Problem(dotted, f"written twice; first at {tree.origins[dotted]}", where))
            continue
        tree.origins[dotted] = where
        if value_node in above:
            tree.problems.append(Problem(dotted, "an alias that contains itself", where))
        elif isinstance(value_node, yaml.MappingNode):
            values[key] = _mapping(loader, value_node, name, dotted + ".", tree, (*above, value_node))
        else:
            values[key] = loader.construct_object(value_node, deep=True)
    return values


def read(path: Path) -> Tree:
    """The file's tree. Raises ConfigError naming the file."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def override(tree: Tree, settings: list[str]) -> None:
    """Lay `a.b=c` settings over the tree, in order. Raises ConfigError where one has no `=`; values are YAML."""
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {setting}: expected KEY=VALUE, such as --set kv.block_size=32")
        value = parse(f"value: {text}", f"--set {dotted}").values["value"]
        at = tree.values
        for part in parts[:-1]:
            inner = at.get(part)
            if not isinstance(inner, dict):
                inner = at[part] = {}
            at = inner
        at[parts[-1]] = value
        for key in [k for k in tree.origins if k.startswith(f"{dotted}.")]:
            del tree.origins[key]
        tree.origins.update(dict.fromkeys(_leaves(dotted, value), "--set"))


def _leaves(dotted: str, value: object) -> list[str]:
    if not isinstance(value, dict):
        return [dotted]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{dotted}.{key}", inner)]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, leaves only."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
