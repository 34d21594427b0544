"""What a worker says of itself to a gateway: the model, the server, its load, and the tokenizer as an archive."""

from __future__ import annotations

import io
import json
import time
import zipfile
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from .. import __version__
from ..proto import worker_pb2 as pb
from ..text.source import ModelSource
from ..text.tokenizer import Tokenizer, read_json
from .handoff import CONNECTOR
from .params import VllmParams

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)


def model_info(
    source: ModelSource, tokenizer: Tokenizer, served_name: str, context: int, vocab_size: int
) -> vllm.GetModelInfoResponse:
    """The model that is served."""
    config = read_json(source.path / "config.json") if source.kind == "huggingface" else {}
    return vllm.GetModelInfoResponse(
        model_path=str(source.path),
        tokenizer_path=str(source.path),
        served_model_name=served_name,
        is_generation=True,
        max_context_length=context,
        max_req_input_len=context - 1,
        vocab_size=vocab_size,
        model_type=str(config.get("model_type", "llama")),
        architectures=[str(name) for name in config.get("architectures") or ()],
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        bos_token_id=-1 if tokenizer.bos_id is None else tokenizer.bos_id,
        pad_token_id=-1,
    )


def server_info(params: VllmParams, welcome: pb.Welcome, active: int, started: float) -> vllm.GetServerInfoResponse:
    """The worker. started: of the monotonic clock."""
    return vllm.GetServerInfoResponse(
        active_requests=active,
        uptime_seconds=time.monotonic() - started,
        server_type="vllm-grpc",
        kv_connector=CONNECTOR,
        kv_role="kv_producer" if params.role == "prefill" else "kv_consumer",
        kv_engine_id=params.worker_id,
        data_parallel_size=1,
        kv_cache_dtype=params.kv_dtype,
        block_size=params.block_size,
        model_dtype=params.model_dtype,
        max_num_seqs=welcome.max_sequences or params.router.max_inflight,
        constrained_decoding_start="first_token",
    )


def load(params: VllmParams, welcome: pb.Welcome, load: pb.Load, tokens_per_s: float) -> vllm.GetLoadsResponse:
    """The worker's state in numbers."""
    total = load.total_blocks or welcome.total_blocks
    used = load.used_blocks / total if total else 0.0
    most = welcome.max_sequences or params.router.max_inflight
    hits, asked = load.prefix_hit_tokens, load.prefix_query_tokens
    record = vllm.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_blocks * welcome.block_size,
        max_total_num_tokens=total * welcome.block_size,
        token_usage=used,
        utilization=load.running / most,
        gen_throughput=tokens_per_s,
        cache_hit_rate=hits / asked if asked else 0.0,
        max_running_requests=most,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return vllm.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[record])


def tokenizer_archive(source: ModelSource, tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """A zip of the tokenizer's files, made from the vocabulary where the model is one GGUF file."""
    if source.kind == "huggingface":
        files = {name: (source.path / name).read_bytes() for name in _FILES if (source.path / name).is_file()}
    else:
        files = _written(tokenizer, vocab_size)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # a fixed time: the same archive from every worker
    return buffer.getvalue()


def _written(tokenizer: Tokenizer, vocab_size: int) -> dict[str, bytes]:
    ends = sorted(tokenizer.eos_token_ids)
    config: dict[str, Any] = {**tokenizer.named_specials, "add_bos_token": tokenizer.add_bos}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "default" in tokenizer.chat_templates:
        config["chat_template"] = tokenizer.chat_templates["default"]
    model = {"model_type": "llama", "eos_token_id": ends, "vocab_size": vocab_size}
    return {
        "tokenizer.json": tokenizer.json().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": json.dumps(model).encode(),
    }
