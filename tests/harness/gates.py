"""Failpoints from a test's side: close a gate, wait until a process stands at it, let it through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

_POLL_S = 0.005


class Gates:
    """A folder of gates shared with the processes under test (see proto/failpoints.py)."""

    def __init__(self, folder: Path, actions: Mapping[str, str]) -> None:
        """actions: point -> "gate", "sleep(S)", "raise" or "exit". A gate is open until it is closed."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._actions = dict(actions)

    @property
    def environment(self) -> dict[str, str]:
        """What the processes' environment must hold."""
        actions = ";".join(f"{point}={action}" for point, action in self._actions.items())
        return {"BATON_FAILPOINTS": actions, "BATON_GATES": str(self._folder)}

    def close(self, point: str) -> None:
        """From now on whoever reaches `point` waits there."""
        if self._actions.get(point) != "gate":
            raise ValueError(f"{point} is no gate of this rig: {self._actions}")
        self._marker(point).unlink(missing_ok=True)
        (self._folder / point).touch()

    def reached(self, point: str) -> bool:
        """Whether somebody has come to `point` since it was closed."""
        return self._marker(point).exists()

    def wait_reached(self, point: str, timeout_s: float = 20.0) -> None:
        """Returns when somebody stands at `point`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.reached(point):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody reached {point} within {timeout_s} s")
            time.sleep(_POLL_S)

    def release(self, point: str) -> None:
        """Opens the gate."""
        (self._folder / point).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Opens every gate."""
        for point in self._actions:
            self.release(point)

    def _marker(self, point: str) -> Path:
        return self._folder / f"{point}.reached"
