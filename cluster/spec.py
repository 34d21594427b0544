"""From the configuration to the parameters of every process, and those as JSON and back.

Nothing here imports torch: the parameter classes are plain, so that commands start fast.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ..decode_worker.params import DecodeParams
from ..engine.params import EngineParams, SpeculationParams
from ..kv_transfer.params import TLSFiles, TransferParams
from ..prefill_worker.params import PrefillParams
from ..proto.errors import ConfigError
from ..proto.peer_tls import PeerTLS
from ..router.params import BatchParams, FrontTLS, GrpcParams, RequestLimits, RouterParams, TenantParams
from ..vllm_engine.params import VllmParams
from . import tenants
from .config import Config, PoolSection
from .config_workload import Percentiles
from .processes import available_cores, threads_per_rank
from .reconcile import POOLS, Backoff
from .units import later_address, show_cores

NODE = "node"  # the host that every rank replaces by the address of its own node


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One rank of one worker. Only followers have `leader`, the address of the leader's rank channel."""

    role: Literal["prefill", "decode"]
    worker_id: str
    rank: int
    leader: str
    cores: tuple[int, ...]  # that it runs on; none named: on any
    prefill: PrefillParams | None
    decode: DecodeParams | None
    vllm: VllmParams | None = None  # of leaders that serve a gateway too

    @property
    def params(self) -> PrefillParams | DecodeParams:
        """Those of the role. Raises ValueError when they are missing."""
        params = self.prefill if self.role == "prefill" else self.decode
        if params is None:
            raise ValueError(f"a {self.role} worker needs its parameters")
        return params


_WORKER: TypeAdapter[WorkerSpec] = TypeAdapter(WorkerSpec)
_ROUTER: TypeAdapter[RouterParams] = TypeAdapter(RouterParams)


def spec_to_json(spec: WorkerSpec) -> dict[str, Any]:
    """As values that JSON can hold; byte strings are ASCII."""
    return dict(_WORKER.dump_python(spec, mode="json"))


def spec_from_json(values: dict[str, Any]) -> WorkerSpec:
    """The inverse of `spec_to_json`. Raises ValueError."""
    return _WORKER.validate_python(values)


def router_to_json(params: RouterParams) -> dict[str, Any]:
    """As values that JSON can hold."""
    return dict(_ROUTER.dump_python(params, mode="json"))


def router_from_json(values: dict[str, Any]) -> RouterParams:
    """The inverse of `router_to_json`. Raises ValueError."""
    return _ROUTER.validate_python(values)


def pool(config: Config, role: str) -> PoolSection:
    """The pool of that role."""
    return config.pools.prefill if role == "prefill" else config.pools.decode


def threads(config: Config, role: str) -> int:
    """Torch threads of each rank of that pool."""
    section = pool(config, role)
    if section.threads != "auto":
        return section.threads
    if section.cores is not None:
        return threads_per_rank(section.replicas * section.tensor_parallel, len(section.cores))
    return threads_per_rank(config.ranks, available_cores())


def cores(config: Config, worker_id: str, rank: int) -> tuple[int, ...]:
    """The share of its pool's cores that a rank runs on; () where none are named. Workers beyond `replicas`, started
    by `scale`, use the shares of the first ones again."""
    role, _, number = worker_id.rpartition("-")
    section = pool(config, role)
    if section.cores is None:
        return ()
    ranks = section.replicas * section.tensor_parallel
    share = len(section.cores) // ranks
    first = (int(number) * section.tensor_parallel + rank) % ranks * share
    return section.cores[first : first + share]


def threads_line(config: Config) -> str:
    """The threads of both pools, in words."""
    chosen = [f"{role} {threads(config, role)}{_how_chosen(pool(config, role))}" for role in POOLS]
    return f"threads per rank: {', '.join(chosen)}; {available_cores()} cores, {config.ranks} ranks"


def _how_chosen(section: PoolSection) -> str:
    auto = " (auto)" * (section.threads == "auto")
    return auto if section.cores is None else f"{auto} on cores {show_cores(section.cores)}"


def _engine(config: Config, role: str) -> EngineParams:
    section = pool(config, role)
    return EngineParams(
        model_path=config.model_path,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        sparsity=config.model.sparsity,
        device=section.device,
        threads=threads(config, role),
        block_size=section.block_size if section.block_size is not None else config.kv.block_size,
        kv_blocks=None,
        kv_bytes=section.memory if section.memory is not None else config.kv.memory,
        kv_dtype=section.kv_dtype if section.kv_dtype is not None else config.kv.dtype,
        max_model_len=config.model.max_model_len,
        batch_invariant=config.engine.batch_invariant,
        prefix_cache=config.engine.prefix_cache,
        layer_group=config.engine.layer_group,
        tensor_parallel=section.tensor_parallel,
    )


def local_engine(config: Config) -> EngineParams:
    """The engine of one process that does the work of both pools: a decode worker's on one rank, on all cores."""
    wanted = config.pools.decode.threads
    cores = available_cores() if wanted == "auto" else wanted
    return replace(_engine(config, "decode"), tensor_parallel=1, threads=cores)


def speculation_params(config: Config) -> SpeculationParams:
    """What a decode worker, or an engine that does the work of both pools, proposes."""
    section = config.engine.speculation
    return SpeculationParams(section.method, section.max_tokens, config.draft_model_path, section.draft_memory)


def _tls(config: Config) -> TLSFiles | None:
    """Paths as every process can open them: relative ones start at the configuration's folder."""
    files = config.kv.tls
    if files is None:
        return None
    return TLSFiles(*(str(config.folder / Path(path).expanduser()) for path in files.paths.values()))


def peer_tls(config: Config) -> PeerTLS | None:
    """Of the cluster's own gRPC connections; paths likewise."""
    files = config.cluster.tls
    if files is None:
        return None
    paths = {key: str(config.folder / Path(path).expanduser()) for key, path in files.paths.items()}
    return PeerTLS(**paths, name=files.name)


def transfer_params(config: Config) -> TransferParams:
    """What every rank's transfer side is started with."""
    return TransferParams(
        host=config.cluster.host,
        connect_timeout_s=config.clocks.link_connect,
        frame_timeout_s=config.clocks.frame,
        idle_close_s=config.clocks.link_idle,
        transport=config.kv.transport,
        tls=_tls(config),
        max_links=config.kv.max_links,
        wire=config.kv.wire,
        checksum=config.kv.checksum,
        max_outstanding=config.kv.outstanding_frames,
        frame_bytes=config.kv.frame_size,
    )


class SpecBuilder:
    """Makes the specification of each rank; the ranks of one incarnation share a secret.

    name: of the model, as clients call it.
    """

    def __init__(self, config: Config, name: str = "") -> None:
        self._config = config
        self._name = name
        self.membership_address = ""  # of the controller, once it is known
        self._secrets: dict[str, bytes] = {}
        self.metrics_folder = ""  # where routers and gateways tell each other what they counted

    def worker(self, worker_id: str, incarnation: str, rank: int, leader: str) -> WorkerSpec:
        """One rank of a worker."""
        if rank == 0:
            self._secrets[worker_id] = secrets.token_hex(32).encode()
        role: Literal["prefill", "decode"] = "prefill" if worker_id.startswith("prefill") else "decode"
        shared: dict[str, Any] = {
            "worker_id": worker_id,
            "incarnation": incarnation,
            "engine": _engine(self._config, role),
            "transfer": transfer_params(self._config),
            "host": self._config.cluster.host,
            "port": 0,
            "secret": self._secrets[worker_id],
            "start_timeout_s": self._config.cluster.start_timeout,
            "rank_timeout_s": self._config.engine.rank_timeout,
            "heartbeat_s": self._config.clocks.heartbeat,
            "dead_after_s": self._config.clocks.dead_after,
            "peer_tls": peer_tls(self._config),
        }
        pools, own = self._config.pools, cores(self._config, worker_id, rank)
        vllm = self._vllm(role, worker_id, incarnation) if rank == 0 else None
        if role == "decode":
            decode = DecodeParams(
                **shared,
                max_sequences=pools.decode.max_sequences,
                max_batch_tokens=pools.decode.prompt_chunk,
                reserve_wait_s=self._config.clocks.reserve,
                commit_timeout_s=self._config.clocks.commit,
                speculation=speculation_params(self._config),
            )
            return WorkerSpec(role, worker_id, rank, leader, own, None, decode, vllm)
        prefill = PrefillParams(
            **shared,
            max_batch_tokens=pools.prefill.max_batch_tokens,
            lookahead=pools.prefill.lookahead,
            commit_timeout_s=self._config.clocks.commit,
            fetch_min_tokens=self._config.kv.fetch_min_tokens,
            fetch_timeout_s=self._config.clocks.fetch,
        )
        return WorkerSpec(role, worker_id, rank, leader, own, prefill, None, vllm)

    def _vllm(self, role: Literal["prefill", "decode"], worker_id: str, incarnation: str) -> VllmParams | None:
        """The service for gateways: the first worker of a pool has its address, the next ones the ports above."""
        config, base = self._config, pool(self._config, role).vllm_grpc
        if base is None:
            return None
        number = int(worker_id.rpartition("-")[2])
        router = router_params(config, self._name, self.membership_address)
        keyless = config.router.gateway_tenant
        return VllmParams(
            address=later_address(base, number),
            key=f"pools.{role}.vllm_grpc",
            role=role,
            worker_id=worker_id,
            incarnation=incarnation,
            block_size=config.kv.block_size,
            kv_dtype=config.kv.dtype,
            model_dtype=config.model.dtype,
            keyless=next((one for one in router.tenants if one.name == keyless), None),
            router=replace(
                router,
                router_id=f"{worker_id}-gateway",
                metrics_socket=f"{self.metrics_folder}/{worker_id}" if self.metrics_folder else "",
            ),
        )


def router_params(config: Config, name: str, membership_address: str) -> RouterParams:
    """The router's parameters; `name` is what clients call the model."""
    router, limits = config.router, config.router.limits
    return RouterParams(
        router_id=f"router-{secrets.token_hex(4)}",
        model_path=config.model_path,
        served_name=name,
        grpc_address=router.grpc,
        grpc=grpc_params(config),
        http_address=router.http,
        share_ports=router.processes > 1,
        joins=False,
        metrics_socket="",  # the deployment knows where its processes meet
        membership_address=membership_address,
        peer_tls=peer_tls(config),
        prefill_placement=router.placement.prefill,
        decode_placement=router.placement.decode,
        disaggregation=router.placement.disaggregation,
        prefix_events=router.placement.prefix_events,
        ttft_objective_s=tightest(config.slo.ttft),
        tpot_objective_s=tightest(config.slo.tpot),
        heartbeat_s=config.clocks.heartbeat,
        dead_after_s=config.clocks.dead_after,
        request_deadline_s=config.clocks.request,
        stall_s=config.clocks.stall,
        attempts=router.attempts,
        max_inflight=router.max_inflight,
        lame_duck_s=config.clocks.lame_duck,
        stream_interval=router.stream_interval,
        tenants=_tenants(config),
        tls=_front_tls(config),
        traces=router.traces or "",
        stop_grace_s=config.cluster.stop_grace / 2,
        limits=RequestLimits(
            n=limits.n,
            logprobs=limits.logprobs,
            stops=limits.stops,
            stop_chars=limits.stop_chars,
            stop_token_ids=limits.stop_token_ids,
            logit_bias=limits.logit_bias,
            prompts=limits.prompts,
            messages=limits.messages,
            prompt_bytes=limits.prompt_size,
            grammar_bytes=limits.grammar_size,
            tools=limits.tools,
            body_bytes=limits.body_size,
            batch=limits.batch,
            parallelism=limits.parallelism,
        ),
        batches=BatchParams(
            folder=config.batches_folder,
            files=router.batches.files,
            file_bytes=router.batches.file_size,
            parallelism=router.batches.parallelism,
        ),
    )


def _tenants(config: Config) -> tuple[TenantParams, ...]:
    router = config.router
    known = tenants.read(config.folder / Path(router.tenants).expanduser()) if router.tenants else ()
    if router.gateway_tenant is not None and router.gateway_tenant not in {one.name for one in known}:
        raise ConfigError(f"router.gateway_tenant: {router.gateway_tenant} is not in {router.tenants}")
    return known


def grpc_params(config: Config) -> GrpcParams:
    """How a router's gRPC port treats its clients."""
    options = config.router.grpc_options
    return GrpcParams(
        keepalive_s=options.keepalive,
        keepalive_timeout_s=options.keepalive_timeout,
        min_ping_interval_s=options.min_ping_interval,
        max_connection_age_s=options.max_connection_age,
        max_streams=options.max_streams,
        reflection=options.reflection,
        channelz=options.channelz,
        open_inference=options.open_inference,
    )


def _front_tls(config: Config) -> FrontTLS | None:
    files = config.router.tls
    if files is None:
        return None
    paths = [files.certificate, files.key, files.client_ca]
    return FrontTLS(*(str(config.folder / Path(path).expanduser()) if path else "" for path in paths))


def tightest(limits: Percentiles) -> float | None:
    """The limit that holds for most requests, in seconds; None: there is none."""
    return next((limit for limit in (limits.p99, limits.p90, limits.p50) if limit is not None), None)


def wanted_workers(config: Config) -> frozenset[str]:
    """The ids of all workers of the configuration."""
    return frozenset(f"{role}-{number}" for role in POOLS for number in range(pool(config, role).replicas))


def backoff(config: Config) -> Backoff:
    """Between restarts."""
    return Backoff(config.cluster.restart_delay, config.cluster.restart_delay_max)


def localised(spec: WorkerSpec, node_address: str) -> WorkerSpec:
    """The specification with the host "node" replaced by this node's address."""
    params = spec.params
    if params.host != NODE:
        return spec
    host = socket.gethostbyname(node_address)
    if spec.prefill is not None:
        transfer = replace(spec.prefill.transfer, host=host)
        return replace(spec, prefill=replace(spec.prefill, host=host, transfer=transfer))
    if spec.decode is not None:
        transfer = replace(spec.decode.transfer, host=host)
        return replace(spec, decode=replace(spec.decode, host=host, transfer=transfer))
    return spec
