"""From a configuration to its cost models: one for each pool and degree of tensor parallelism."""

from __future__ import annotations

import dataclasses

from ...proto.errors import ConfigError
from .. import hardware, spec
from ..config import Config
from ..hardware import Hardware, Measured
from .costs import CostModel, Options
from .model_shape import Shape, find

_CHUNK = 2048  # tokens of prompts in a step of an aggregated worker
_QUANTISED = {"none": "", "w8a8": "int8", "int4": "int4"}


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The model and the machine of a configuration."""

    shape: Shape
    hardware: Hardware
    config: Config

    def cost(self, role: str, tp: int | None = None) -> CostModel:
        """Of a worker of the pool `role`; `tp`: instead of the pool's."""
        degree = spec.pool(self.config, role).tensor_parallel if tp is None else tp
        return CostModel(self.shape, self.hardware, degree, options(self.config, role), self._measured(role, degree))

    def _measured(self, role: str, tp: int) -> Measured | None:
        model, pool = self.config.model, spec.pool(self.config, role)
        for entry in self.hardware.measured:
            same = (entry.model, entry.dtype, entry.quantization, entry.tensor_parallel)
            wanted = (self.shape.name, model.dtype, model.quantization, tp)
            if same == wanted and (pool.device != "cpu" or entry.threads == spec.threads(self.config, role)):
                return entry
        return None


def site(config: Config) -> Site:
    """Raises ConfigError: no hardware named, or a model that is not to be found."""
    profile = hardware.find(config)
    if profile is None:
        known = ", ".join(sorted(entry.stem for entry in hardware.CATALOGUE.glob("*.yaml")))
        raise ConfigError(f"hardware: is missing; name a file from `baton calibrate`, or one of {known}")
    changes: dict[str, float] = {}
    if config.plan.bandwidth is not None:
        changes["bandwidth"] = config.plan.bandwidth
    if config.plan.price is not None:
        changes["price"] = config.plan.price
    return Site(find(config.model.path, config.folder), profile.model_copy(update=changes), config)


def options(config: Config, role: str) -> Options:
    """How a worker of the pool `role` runs its model."""
    pool, section = spec.pool(config, role), config.plan
    weights = section.weights
    if weights == "auto":
        weights = _QUANTISED[config.model.quantization] or config.model.dtype  # type: ignore[assignment]
    kv = pool.kv_dtype or config.kv.dtype
    memory = pool.memory if pool.memory is not None else config.kv.memory
    speculation = config.engine.speculation
    return Options(
        weights=weights,
        kv=config.model.dtype if kv == "auto" else kv,
        block_size=pool.block_size or config.kv.block_size,
        max_batch_tokens=config.pools.prefill.max_batch_tokens if role == "prefill" else _CHUNK,
        max_sequences=config.pools.decode.max_sequences,
        memory_share=section.memory_share,
        reserve=section.reserve,
        kv_memory=memory if pool.device == "cpu" else None,
        layer_group=config.engine.layer_group,
        link=section.link,
        wire=1.0 if config.kv.wire == "raw" else 0.53,
        spec_tokens=speculation.max_tokens if role == "decode" and speculation.method != "none" else 0,
        spec_accepted=section.speculation.accepted,
        spec_cost=section.speculation.cost,
    )
