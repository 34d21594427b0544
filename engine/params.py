"""What one engine is built from: resolved values only, without defaults (those are in the cluster's configuration)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Quantization = Literal["none", "w8a8", "int4"]
Sparsity = Literal["auto", "none", "2:4"]
SpeculationMethod = Literal["none", "prompt_lookup", "draft"]


@dataclass(frozen=True, slots=True)
class EngineParams:
    """The engine of one worker; every rank of the worker has the same."""

    model_path: str  # bundled name, Hugging Face directory or .gguf file
    dtype: str  # float32 | bfloat16
    quantization: Quantization  # of the linear layers' weights; w8a8 and int4: on a CPU, with bfloat16
    sparsity: Sparsity  # 2:4: linear weights with two zeros in every four inputs; auto: where the checkpoint says so
    device: Device
    threads: int  # of torch, per rank
    block_size: int  # tokens
    kv_blocks: int | None  # pool size in blocks; None: from kv_bytes
    kv_bytes: int  # pool size per rank, in bytes; used where kv_blocks is None
    kv_dtype: str  # of the pool: auto (= dtype) | float32 | bfloat16 | float16 | int8 | fp8
    max_model_len: int | None  # tokens; None: what the model was trained for
    batch_invariant: bool  # the same bits whatever the batch, the chunk and the block size
    prefix_cache: bool
    layer_group: int  # layers whose KV is announced together
    tensor_parallel: int  # ranks


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculative decoding of one engine."""

    method: SpeculationMethod
    max_tokens: int  # proposed for a sequence in one step, at most
    draft_model: str  # like EngineParams.model_path; read where the method is draft
    draft_kv_bytes: int  # of the draft model's own pool
