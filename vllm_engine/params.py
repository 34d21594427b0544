"""What a worker's vllm.grpc.engine.VllmEngine service is started with; cluster/config.py chooses the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..router.params import RouterParams, TenantParams


@dataclass(frozen=True, slots=True)
class VllmParams:
    """`router`: of the router inside the worker; its addresses are not used."""

    address: str  # host:port to listen on
    key: str  # of the configuration, where that address comes from
    role: Literal["prefill", "decode"]
    worker_id: str
    incarnation: str
    block_size: int  # what a gateway compares before it pairs two workers: that of the cluster, since pools convert
    kv_dtype: str
    model_dtype: str
    keyless: TenantParams | None  # whose calls without a key are, where there are tenants; None: they are refused
    router: RouterParams
