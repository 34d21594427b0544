"""The runner of one rank, by where it computes."""

from __future__ import annotations

from collections.abc import Callable

from .params import EngineParams
from .ranks import RankGroup
from .runner import Runner


def make_runner(
    params: EngineParams,
    group: RankGroup,
    progress: Callable[[int, int], None],
    broadcast: Callable[[bytes], None] | None,
) -> Runner:
    """See Runner. What a GPU needs is loaded for one only. Raises ConfigError."""
    if params.device == "cuda":
        from .device_runner import make_device_runner

        return make_device_runner(params, group, progress, broadcast)
    return Runner(params, group, progress, broadcast)
