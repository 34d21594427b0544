"""The YAML schema of every command, and with `config_base.py` and `config_workload.py` the only place in baton where
defaults are written.

`config_load.load` reads a file into `Config`; `spec.py` turns a `Config` into the parameter classes of the other
rooms. Units are resolved here: bytes, seconds, per second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from .config_base import ClusterTLSSection, Count, FrontTLSSection, Section, Text, TLSSection
from .config_workload import PlanSection, SLOSection, WorkloadSection
from .units import Address, Bytes, Cores, Duration

PrefillPlacement = Literal[
    "round_robin", "power_of_two", "least_loaded", "prefix_aware", "session_affinity", "latency_aware"
]
Disaggregation = Literal["always", "never", "conditional"]
DecodePlacement = Literal[
    "round_robin", "power_of_two", "least_loaded", "prefix_aware", "session_affinity", "latency_aware", "transfer_aware"
]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]


class ModelSection(Section):
    """Which model is served."""

    path: Text  # bundled name, Hugging Face directory or .gguf file; relative to the configuration's folder
    name: Text | None = None  # what clients call it; None: from the path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantization: Literal["none", "w8a8", "int4"] = "none"  # of linear layers, when they are loaded; bfloat16
    sparsity: Literal["auto", "none", "2:4"] = "auto"  # of linear weights, on GPUs; auto: where the checkpoint says 2:4
    max_model_len: Annotated[int, Field(ge=8)] | None = None  # tokens; None: what the model was trained for


class ClusterSection(Section):
    """Where the processes run and how patient their controller is."""

    address: Text = "local"  # local | auto | host:port of a running Ray cluster
    launcher: Literal["ray", "process"] = "ray"
    host: Text = "127.0.0.1"  # workers listen there; "node": the address of the node each rank runs on
    placement_timeout: Duration = 10.0  # a Ray placement pending for longer fails
    start_timeout: Duration = 600.0  # from the start of a worker to its readiness
    self_test_timeout: Duration = 60.0  # of one request through each pair before a worker counts as ready
    stop_grace: Duration = 10.0  # a worker or router that is stopped ends within this, or is killed
    drain_timeout: Duration = 600.0  # a draining worker may finish its requests for so long
    restart_delay: Duration = 0.5  # after a worker's death; doubles with each one that follows soon
    restart_delay_max: Duration = 30.0
    tls: ClusterTLSSection | None = None  # of sessions, membership and admin; None: plain TCP, and anybody may
    logs: Literal["text", "json"] = "text"  # of `serve`, on stderr; json: everything, one object a line


class PoolSection(Section):
    """What both pools have."""

    replicas: Count = 1
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = (
        "auto"  # of torch, per rank; auto: its cores, or cores available / ranks on this machine
    )
    cores: Cores | None = None  # 0-3,8: the ranks run on these only, each on an equal share; None: on any
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None  # tokens; None: kv.block_size
    memory: Bytes | None = None  # of the KV pool, per rank; None: kv.memory
    kv_dtype: KVDtype | None = None  # of the KV pool; None: kv.dtype
    vllm_grpc: Address | None = None  # where the first worker speaks vllm.grpc.engine for a gateway, and the next ones
    # on the ports above; None: nowhere


class PrefillPool(PoolSection):
    """Workers that read prompts."""

    max_batch_tokens: Count = 512  # prompt tokens of one step
    lookahead: Count = 2  # steps' worth of prompts that may hold a reservation on a decode worker


class DecodePool(PoolSection):
    """Workers that generate."""

    max_sequences: Count = 64  # of one step
    prompt_chunk: Count = 128  # tokens of prompts that are computed here (router.placement.disaggregation), beside the
    # sequences of one step, which wait for them


class PoolsSection(Section):
    """The two pools."""

    prefill: PrefillPool = PrefillPool()
    decode: DecodePool = DecodePool()


class SpeculationSection(Section):
    """Speculative decoding: tokens that are proposed and checked several in a step. The answers stay the same."""

    method: Literal["none", "prompt_lookup", "draft"] = "none"
    max_tokens: Annotated[int, Field(ge=1, le=64)] = 8  # proposed for a sequence in one step, at most
    draft_model: Text | None = None  # for method draft: like model.path, with the same tokenizer
    draft_memory: Bytes = 2**28  # of the draft model's own KV pool


class EngineSection(Section):
    """How the model is run."""

    batch_invariant: bool = True  # the same bits whatever the batch, the chunks and the blocks
    prefix_cache: bool = True
    speculation: SpeculationSection = SpeculationSection()  # of decode workers
    layer_group: Count = 4  # layers whose KV is sent together
    rank_timeout: Duration = 10.0  # of one exchange among the ranks of a worker


class KVSection(Section):
    """The KV pools and the way from one to the other."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16  # tokens
    memory: Bytes = 2**30  # of the KV pool, per rank
    dtype: KVDtype = "auto"  # of the pools; auto: model.dtype
    transport: Literal["auto", "inline", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"  # auto: by where the pools are
    tls: TLSSection | None = None  # None: links are plain TCP
    max_links: Count = 64  # open at the same time, per prefill rank
    wire: Literal["raw", "fp8", "int8"] = "raw"  # how KV travels: as it is, or one byte per value and a scale per row
    checksum: bool = True
    parking: Literal[0] = 0
    fetch_min_tokens: Annotated[int, Field(ge=0)] = 256  # a prefill worker takes over a decode worker's prefix of more
    # than its own by so many tokens instead of computing it; 0: never
    frame_size: Bytes = 4 * 2**20  # payload of one frame of a large transfer, about
    outstanding_frames: Annotated[int, Field(ge=1, le=16)] = 2  # per link


class PlacementSection(Section):
    """How the router picks a worker of each pool."""

    prefill: PrefillPlacement = "least_loaded"
    decode: DecodePlacement = "least_loaded"
    disaggregation: Disaggregation = "always"  # where a prompt is computed; always: on a prefill worker, never: on the
    # decode worker that will decode it, conditional: there if that delays everybody less
    prefix_events: bool = (
        True  # workers tell routers what their prefix caches hold, where placement asks for it; false:
    )
    # a router goes by what it has sent itself


class LimitsSection(Section):
    """What one request may ask for."""

    n: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    stops: Count = 16
    stop_chars: Count = 256
    stop_token_ids: Count = 64
    logit_bias: Count = 1024
    prompts: Count = 64
    messages: Count = 1024
    prompt_size: Bytes = 2 * 2**20
    grammar_size: Bytes = 64 * 2**10  # of a schema, pattern or grammar that an answer must follow
    tools: Count = 128  # of one chat
    body_size: Bytes = 4 * 2**20  # JSON of more holds up every stream while it is parsed
    batch: Count = 1024  # requests of one GenerateBatch call
    parallelism: Count = 64  # of these, at the same time


class GrpcSection(Section):
    """The gRPC port that clients connect to."""

    keepalive: Duration = 30.0  # a client that says nothing for so long is pinged
    keepalive_timeout: Duration = 10.0  # and gone when it does not answer
    min_ping_interval: Duration = 0.5  # clients may ping that often, with calls and without
    max_connection_age: Duration | None = None  # then a client is asked to connect anew, for balancers below HTTP/2
    max_streams: Count = 10_000  # calls of one connection at the same time
    reflection: bool = True
    channelz: bool = True
    open_inference: bool = True  # KServe v2: inference.GRPCInferenceService beside baton.v1, /v2 of the HTTP port


class BatchesSection(Section):
    """/v1/files and /v1/batches: files of requests that are answered when nobody else wants anything."""

    folder: Text | None = None  # where files and batches are kept; relative to the configuration's folder; None: off
    files: Count = 1000  # kept at the same time, and as many batches
    file_size: Bytes = 100 * 2**20  # of one that is uploaded
    parallelism: Count = 32  # requests of a batch at the same time


class RouterSection(Section):
    """The front door. Port 0 takes a free port."""

    grpc: Address = "127.0.0.1:50051"
    http: Address = "127.0.0.1:8000"
    admin: Address = "127.0.0.1:50052"
    grpc_options: GrpcSection = GrpcSection()
    placement: PlacementSection = PlacementSection()
    processes: Annotated[int, Field(ge=1, le=64)] = 1  # routers that share the ports of grpc and http
    attempts: Count = 3  # placements of one leg that may fail, the first included
    max_inflight: Count = 1024  # requests
    stream_interval: Annotated[int, Field(ge=1, le=1024)] = 1  # tokens of a choice in one message to the client, its
    # first one aside, where the request does not say; more costs the router less
    tenants: Text | None = None  # a file of tenants and the hashes of their API keys (`baton keys`); None: no keys
    gateway_tenant: Text | None = (
        None  # whose requests those of gateways are that show no key (pools.*.vllm_grpc), as SMG
    )
    # cannot; None: they are refused
    tls: FrontTLSSection | None = None  # None: plain HTTP and gRPC
    traces: Text | None = None  # OTLP endpoint (gRPC) for spans, http://host:4317; None: no spans
    limits: LimitsSection = LimitsSection()
    batches: BatchesSection = BatchesSection()


class ClocksSection(Section):
    """Every wait has an end."""

    heartbeat: Duration = 0.5  # of a session between router and worker
    dead_after: Duration = 2.0  # without a heartbeat
    link_connect: Duration = 2.0
    frame: Duration = 5.0
    reserve: Duration = 120.0  # a request waits so long for blocks of a decode worker before another is tried
    commit: Duration = 30.0  # from a reservation to its KV, or from one sign of progress to the next; blocks whose KV
    # did not reach another worker are kept so long
    fetch: Duration = 5.0  # a prefix that a decode worker did not send within this is computed
    link_idle: Duration = 60.0  # an unused link is closed
    request: Duration = 600.0
    lame_duck: Duration = 0.0  # a router that stops says for so long that it is not ready, and serves still
    stall: Duration = 30.0  # a router whose requests have not gone on for so long says that it is not ready


class Config(Section):
    """One cluster."""

    model: ModelSection
    cluster: ClusterSection = ClusterSection()
    pools: PoolsSection = PoolsSection()
    engine: EngineSection = EngineSection()
    kv: KVSection = KVSection()
    router: RouterSection = RouterSection()
    clocks: ClocksSection = ClocksSection()
    slo: SLOSection = SLOSection()
    workload: WorkloadSection = WorkloadSection()
    plan: PlanSection = PlanSection()
    hardware: Text | None = None  # a name in configs/hardware/ or a file

    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    def located(self, folder: Path, origins: dict[str, str], raw: dict[str, Any]) -> Config:
        """The same configuration, knowing the folder of its file and where and how each dotted key was written."""
        self._folder, self._origins, self._raw = folder, origins, raw
        return self

    @property
    def folder(self) -> Path:
        """Of the configuration's file: relative paths start there."""
        return self._folder

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key -> where its value was written; keys that are absent have their default."""
        return self._origins

    @property
    def raw(self) -> dict[str, Any]:
        """Dotted key -> the value as it was written."""
        return self._raw

    @property
    def model_path(self) -> str:
        """`model.path` for text.source.resolve: a path relative to the configuration's folder, if there is one."""
        return self._model_at(self.model.path)

    @property
    def draft_model_path(self) -> str:
        """`engine.speculation.draft_model`, likewise; empty where there is none."""
        path = self.engine.speculation.draft_model
        return "" if path is None else self._model_at(path)

    @property
    def batches_folder(self) -> str | None:
        """`router.batches.folder`, in the configuration's folder where it is relative."""
        folder = self.router.batches.folder
        return None if folder is None else str(self._folder / Path(folder).expanduser())

    def _model_at(self, path: str) -> str:
        beside = self._folder / Path(path).expanduser()
        return str(beside) if beside.exists() else path

    @property
    def ranks(self) -> int:
        """Processes of both pools together."""
        return sum(pool.replicas * pool.tensor_parallel for pool in (self.pools.prefill, self.pools.decode))
