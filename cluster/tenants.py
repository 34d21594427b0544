"""The file of tenants that `router.tenants` names, and `baton keys`, which makes an API key for it.

alice:
  keys: [9f86d0...]        # hashes; a key itself is shown once, when it is made
  weight: 2                # of the prompts that wait, twice the share of a tenant of weight 1
  tokens_per_second: 5000  # prompt tokens and those that it may generate; absent: as many as there are
  burst: 20000             # that it may use at once after a pause; absent: one second's worth
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from ..proto.errors import ConfigError
from ..router.params import TenantParams
from ..router.tenants import key_hash
from .config_base import Section

_PREFIX = "baton-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class TenantSection(Section):
    """One tenant."""

    keys: Annotated[list[_Hash], Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, le=1000, strict=False)] = 1.0
    tokens_per_second: Annotated[float, Field(gt=0, strict=False)] | None = None
    burst: Annotated[float, Field(gt=0, strict=False)] | None = None


_FILE: TypeAdapter[dict[str, TenantSection]] = TypeAdapter(dict[str, TenantSection])


def read(path: Path) -> tuple[TenantParams, ...]:
    """The tenants of a file. Raises ConfigError with every mistake."""
    try:
        values = yaml.safe_load(path.read_text())
        sections = _FILE.validate_python(values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"router.tenants: {path}: {error}") from None
    except ValidationError as errors:
        lines = [f"router.tenants: {path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors.errors()]
        raise ConfigError("\n".join(lines)) from None
    found: dict[str, str] = {}
    for name, section in sections.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"router.tenants: {path}: {name!r}: a name is letters, digits, dots, dashes, up to 64")
        for digest in section.keys:
            if found.setdefault(digest, name) != name:
                raise ConfigError(f"router.tenants: {path}: {name} and {found[digest]} have the same key {digest}")
    if not sections:
        raise ConfigError(f"router.tenants: {path}: names no tenant; nobody could use the cluster")
    return tuple(
        TenantParams(name, tuple(section.keys), section.weight, section.tokens_per_second, section.burst)
        for name, section in sections.items()
    )


def make_key(tenant: str, path: Path) -> str:
    """A new key, whose hash is added to the tenant in the file (made where it does not exist). Raises ConfigError."""
    if not _NAME.fullmatch(tenant):
        raise ConfigError(f"TENANT: {tenant!r}: a name is letters, digits, dots, dashes, up to 64")
    values: dict[str, Any] = {}
    if path.exists():
        read(path)
        values = yaml.safe_load(path.read_text())
    key = _PREFIX + secrets.token_urlsafe(32)
    values.setdefault(tenant, {}).setdefault("keys", []).append(key_hash(key))
    scratch = path.with_name(path.name + ".new")
    scratch.touch(mode=0o600)
    scratch.write_text(yaml.safe_dump(values, sort_keys=False))
    scratch.replace(path)
    return key
