"""What `baton doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor; `fix` says what to do."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    fix: str = ""
