"""The autoscaler over a simulated cluster: it looks every so often, as a controller would."""

from __future__ import annotations

from ..autoscaler import ROLES, Autoscaler, Bounds, Role, decode_capacity
from ..planner.workload import Distribution
from .run import Simulation
from .spec import Cluster

_USE = 0.7  # of a worker's capacity
_LOOK_S, _PATIENCE_S = 10.0, 60.0


def scaling(
    cluster: Cluster, prompts: Distribution, outputs: Distribution, most: int, start_s: float
) -> tuple[float, Scaling]:
    """For `Simulation(every=...)`: pools of one to `most` workers, by what such requests let a worker do.

    Raises ConfigError where one request alone misses the objective of TPOT.
    """
    prompt, law = prompts.mean, cluster.prefill.law
    context = prompt + outputs.mean / 2
    batch = max(1, min(cluster.decode.max_sequences, int(cluster.decode.blocks * cluster.block_size / context)))
    capacity: dict[Role, float] = {
        "prefill": prompt / law.seconds((1.0, prompt, prompts.square)),
        "decode": decode_capacity(cluster.decode.law, context, batch, cluster.rules.objectives.tpot_s),
    }
    bounds = {role: Bounds(1, most, _USE, capacity[role]) for role in ROLES}
    return _LOOK_S, Scaling(Autoscaler(bounds, _PATIENCE_S), _LOOK_S, start_s)


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
