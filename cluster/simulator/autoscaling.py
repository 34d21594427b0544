"""The autoscaler over a simulated cluster: it looks every so often, as a controller would."""

from __future__ import annotations

from ..autoscaler import ROLES, Autoscaler, Role
from .run import Simulation


class Scaling:
    """An observer of a `Simulation`, to be called every `every_s`. `sizes`: (time, role, workers) of each change."""

    def __init__(self, scaler: Autoscaler, every_s: float, start_s: float) -> None:
        self._scaler, self._every_s, self._start_s = scaler, every_s, start_s
        self._prompt = self._output = 0
        self.sizes: list[tuple[float, Role, int]] = []

    def __call__(self, run: Simulation) -> None:
        """Decide, and change what is decided."""
        loads: dict[Role, float | None] = {
            "prefill": (run.prompt_tokens - self._prompt) / self._every_s,
            "decode": (run.output_tokens - self._output) / self._every_s,
        }
        self._prompt, self._output = run.prompt_tokens, run.output_tokens
        ready = {role: len(run.pool(role)) for role in ROLES}
        for role, size in self._scaler.decide(run.clock.now, loads, ready, run.starting).items():
            if size != ready[role] + run.starting[role]:
                self.sizes.append((run.clock.now, role, size))
                run.scale(role, size, self._start_s)
