"""How far a batch is: counted purely, shown on stderr as a bar on a terminal and as a line now and then elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINE_EVERY_S = 10.0


@dataclass(slots=True)
class Tally:
    """The counts of one run over `total` lines of input."""

    total: int
    started_s: float
    skipped: int = 0  # done by earlier runs
    answered: int = 0
    failed: int = 0
    tokens: int = 0  # of output, as the answers' usage says

    @property
    def done(self) -> int:
        """Lines that need nothing more."""
        return self.skipped + self.answered + self.failed

    def tokens_per_s(self, now: float) -> float:
        """Output tokens of whole answers, over the time of this run."""
        return self.tokens / (now - self.started_s) if now > self.started_s else 0.0

    def left_s(self, now: float) -> float | None:
        """Until the end at the pace of this run; None while it has none."""
        finished = self.answered + self.failed
        return (now - self.started_s) / finished * (self.total - self.done) if finished else None

    def text(self, now: float) -> str:
        """All of it in words."""
        parts = [f"{self.done:,} of {self.total:,} lines"]
        parts += [f"{self.skipped:,} from before"] if self.skipped else []
        parts += [f"{self.failed:,} failed"] if self.failed else []
        left = self.left_s(now)
        parts += [f"{self.tokens_per_s(now):,.1f} tokens/s", "- left" if left is None else f"{duration(left)} left"]
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3:07 min` or `2:05 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class BatchProgress:
    """Shows a tally while the block runs; call `show` often."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._shown_s = tally.started_s
        self._terminal = sys.stderr.isatty()
        columns = (BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not self._terminal)
        self._task = self._bar.add_task("", total=tally.total)

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: float) -> None:
        """The present state."""
        self._bar.update(self._task, completed=self._tally.done, description=self._tally.text(now))
        if not self._terminal and now - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = now
            print(f"batch: {self._tally.text(now)}", file=sys.stderr, flush=True)
