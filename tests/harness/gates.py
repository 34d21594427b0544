"""Failpoints from a test's side: close a gate, wait until a process stands at it, see who it is, let it through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.005


class Held(NamedTuple):
    """Who stands at a gate: a worker id, with its rank where that is not 0, or "router"."""

    pid: int
    process: str


class Gates:
    """A folder of gates shared with the processes under test (see proto/failpoints.py)."""

    def __init__(self, folder: Path, actions: Mapping[str, str]) -> None:
        """actions: point or point[process] -> action of proto/failpoints.py. A gate is open until it is closed."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._actions = dict(actions)

    @property
    def environment(self) -> dict[str, str]:
        """What the processes' environment must hold."""
        actions = ";".join(f"{point}={action}" for point, action in self._actions.items())
        return {"BATON_FAILPOINTS": actions, "BATON_GATES": str(self._folder)}

    def close(self, point: str, process: str = "") -> None:
        """From now on whoever reaches `point` waits there; with `process` only that one."""
        usable = [name.split("[")[0] for name, action in self._actions.items() if action == "gate" or action[-1] == "?"]
        if point not in usable:
            raise ValueError(f"{point} is no gate of this rig: {self._actions}")
        self._marker(point).unlink(missing_ok=True)
        note = self._folder / ".closing"
        note.write_text(str(time.monotonic_ns()))  # who still stands there since the last time may go
        note.rename(self._folder / (f"{point}[{process}]" if process else point))

    def reached(self, point: str) -> bool:
        """Whether somebody has come to `point` since it was closed."""
        return self._marker(point).exists()

    def wait_reached(self, point: str, timeout_s: float = 40.0) -> Held:
        """Returns when somebody stands at `point`, the one who came last. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.reached(point):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody reached {point} within {timeout_s} s")
            time.sleep(_POLL_S)
        pid, _, process = self._marker(point).read_text().partition(" ")
        return Held(int(pid), process)

    def let_one(self, point: str, timeout_s: float = 40.0) -> None:
        """Lets by who stands at the closed gate; the next one waits there again. Raises TimeoutError."""
        token = self._folder / f"{point}.pass"
        self._marker(point).unlink(missing_ok=True)
        token.touch()
        deadline = time.monotonic() + timeout_s
        while token.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody passed {point} within {timeout_s} s")
            time.sleep(_POLL_S)

    def release(self, point: str) -> None:
        """Opens the gate, for everybody."""
        for gate in (self._folder / point, *self._folder.glob(f"{point}[[]*")):
            gate.unlink(missing_ok=True)

    def release_all(self) -> None:
        """Opens every gate."""
        for point in self._actions:
            self.release(point.split("[")[0])

    def _marker(self, point: str) -> Path:
        return self._folder / f"{point}.reached"
