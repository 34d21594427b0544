"""What a configuration may not combine (mistakes, exit 2) and what it had better not (warnings): pure checks of a
whole Config, before anything is loaded."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from .config import Config, PoolSection
from .units import later_address, show_bytes, show_cores, show_duration, split_address

_ANY = {"0.0.0.0", "::"}
_GRPC_CLOCKS = ("keepalive", "keepalive_timeout", "min_ping_interval", "max_connection_age")
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def mistakes(config: Config) -> dict[str, str]:
    """Dotted key -> what is wrong with its value beside the others."""
    engine, front = _model(config) | _speculation(config), _ports(config) | _front(config)
    return front | _launcher(config) | engine | _transport(config) | _pools(config) | _clocks(config)


def _ports(config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("prefill", "decode"):
        section = getattr(config.pools, name)
        last = split_address(section.vllm_grpc)[1] + section.replicas - 1 if section.vllm_grpc is not None else 0
        if last > 65535:
            found[f"pools.{name}.vllm_grpc"] = f"is {section.vllm_grpc}: {section.replicas} workers need as many ports"
    if found:
        return found
    named = [(f"router.{name}", getattr(config.router, name)) for name in ("grpc", "http", "admin")]
    named += _gateway_ports(config)
    for (first, one), (second, two) in combinations(named, 2):
        (host, port), (other_host, other_port) = split_address(one), split_address(two)
        if port == 0 or port != other_port:
            continue
        alike = {host, other_host} <= _LOOPBACK or host == other_host
        if alike or {host, other_host} & _ANY:
            found[second] = f"is {two}, the same port as {first} ({one}); give each its own, or 0"
    return found


def _gateway_ports(config: Config) -> list[tuple[str, str]]:
    """Where workers speak to gateways: each one port above the one before it."""
    found: list[tuple[str, str]] = []
    for name in ("prefill", "decode"):
        section = getattr(config.pools, name)
        if section.vllm_grpc is not None:
            key = f"pools.{name}.vllm_grpc"
            found += [(key, later_address(section.vllm_grpc, number)) for number in range(section.replicas)]
    return found


def _front(config: Config) -> dict[str, str]:
    router = config.router
    if router.gateway_tenant is not None and router.tenants is None:
        return {"router.gateway_tenant": "needs router.tenants, which names it"}
    named = {"router.tenants": router.tenants}
    if config.cluster.tls is not None:
        named |= {f"cluster.tls.{key}": path for key, path in config.cluster.tls.paths.items()}
    if router.tls is not None:
        files = {name: getattr(router.tls, name) for name in type(router.tls).model_fields}
        named |= {f"router.tls.{name}": path for name, path in files.items()}
    return {
        key: f"is {path}, which is not a file"
        for key, path in named.items()
        if path is not None and not (config.folder / Path(path).expanduser()).is_file()
    }


def exposed(config: Config) -> list[str]:
    """Listeners that other hosts can reach and anybody may use."""
    router, found = config.router, []
    mutual = router.tls is not None and router.tls.client_ca is not None
    guarded = router.tenants is not None or mutual
    listeners = [(f"router.{name}", getattr(router, name)) for name in ("grpc", "http", "admin")]
    for name in ("prefill", "decode"):
        address = getattr(config.pools, name).vllm_grpc
        if address is not None:
            listeners.append((f"pools.{name}.vllm_grpc", address))
    for key, address in listeners:
        admin, keyless = key == "router.admin", key.startswith("pools.") and router.gateway_tenant is not None
        safe = config.cluster.tls is not None if admin else mutual if keyless else guarded
        if split_address(address)[0] in _LOOPBACK or safe:
            continue
        what = "can drain workers and scale pools" if admin else "can use the model"
        cure = "give cluster.tls, or listen on 127.0.0.1" if admin else "give router.tenants (see `baton keys`)"
        found.append(f"{key} listens on {address}: whoever reaches it {what} without a key; {cure}")
    if config.cluster.host not in _LOOPBACK and config.cluster.tls is None:
        found.append(
            f"cluster.host is {config.cluster.host}: whoever reaches a worker can use the model without a key; "
            "give cluster.tls"
        )
    return found


def _launcher(config: Config) -> dict[str, str]:
    cluster = config.cluster
    if cluster.address not in ("local", "auto"):
        try:
            _, port = split_address(cluster.address)
        except ValueError:
            port = 0
        if not port:
            near = "local" if cluster.address.lower().startswith("l") else "auto"
            return {
                "cluster.address": f"is {cluster.address}, but must be local, auto or HOST:PORT of a running Ray "
                f"cluster; did you mean {near}?"
            }
    if cluster.launcher == "process" and cluster.address != "local":
        return {
            "cluster.launcher": f"is process, which starts processes on this machine only, but cluster.address is "
            f"{cluster.address}; use ray"
        }
    return {}


def _model(config: Config) -> dict[str, str]:
    model = config.model
    if model.quantization == "none":
        return {}
    if model.sparsity == "2:4":
        return {"model.sparsity": f"is 2:4, which needs model.quantization none, not {model.quantization}"}
    if model.dtype != "bfloat16":
        return {"model.quantization": f"is {model.quantization}, which needs model.dtype bfloat16, not {model.dtype}"}
    return {}


def _speculation(config: Config) -> dict[str, str]:
    section, key = config.engine.speculation, "engine.speculation"
    if section.method == "draft" and section.draft_model is None:
        return {f"{key}.method": f"is draft, which needs a model that proposes; give {key}.draft_model"}
    if section.method != "draft" and section.draft_model is not None:
        return {f"{key}.draft_model": f"is {section.draft_model}, but {key}.method is {section.method}; use draft"}
    if section.method == "draft" and section.draft_memory < 2**10:
        return {f"{key}.draft_memory": f"is {show_bytes(section.draft_memory)}, too little for a KV pool"}
    return {}


def _transport(config: Config) -> dict[str, str]:
    devices = {config.pools.prefill.device, config.pools.decode.device}
    transport, tls = config.kv.transport, config.kv.tls
    if transport in ("nccl", "cuda_ipc") and devices != {"cuda"}:
        return {"kv.transport": f"is {transport}, which moves KV between GPUs, but a pool has device cpu; use auto"}
    if tls is not None and transport not in ("auto", "inline"):
        return {"kv.transport": f"is {transport}, which does not encrypt, but kv.tls is set; use auto or inline"}
    for pool in (config.pools.prefill, config.pools.decode):
        kind = config.kv.dtype if pool.kv_dtype is None else pool.kv_dtype
        if config.kv.wire != "raw" and kind in ("int8", "fp8"):
            return {
                "kv.wire": f"is {config.kv.wire}, but a pool has kv dtype {kind}, which is as small already; use raw"
            }
    if config.kv.max_links < config.pools.decode.tensor_parallel:
        return {
            "kv.max_links": f"is {config.kv.max_links}, but one request may need a link to each of "
            f"{config.pools.decode.tensor_parallel} decode ranks"
        }
    for key, path in ({} if tls is None else tls.paths).items():
        if not (config.folder / Path(path).expanduser()).is_file():
            return {f"kv.tls.{key}": f"is {path}, which is not a file"}
    return {}


def _pools(config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("prefill", "decode"):
        pool = getattr(config.pools, name)
        memory, key = (
            (pool.memory, f"pools.{name}.memory") if pool.memory is not None else (config.kv.memory, "kv.memory")
        )
        if memory < 2**10:
            found[key] = f"is {show_bytes(memory)}, too little for a KV pool; give at least 1KiB"
        found |= _cores(f"pools.{name}", pool)
    sizes = {"kv.frame_size": config.kv.frame_size, "router.limits.body_size": config.router.limits.body_size}
    for key, size in sizes.items():
        if not 2**10 <= size <= 2**28:
            found[key] = f"is {show_bytes(size)}, but must lie between 1KiB and 256MiB"
    return found


def _cores(prefix: str, pool: PoolSection) -> dict[str, str]:
    if pool.cores is None:
        return {}
    shown, ranks = show_cores(pool.cores), pool.replicas * pool.tensor_parallel
    if len(pool.cores) < ranks:
        return {f"{prefix}.cores": f"is {shown}, but the pool has {ranks} ranks; give at least one core for each"}
    share = len(pool.cores) // ranks
    if pool.threads != "auto" and pool.threads > share:
        return {
            f"{prefix}.threads": f"is {pool.threads}, but each rank has {share} of the cores {shown}; give more in "
            f"{prefix}.cores, or auto here"
        }
    return {}


def _clocks(config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    clocks, cluster = config.clocks, config.cluster
    named = {f"clocks.{key}": getattr(clocks, key) for key in type(clocks).model_fields}
    named |= {
        f"cluster.{key}": getattr(cluster, key) for key in ("placement_timeout", "start_timeout", "self_test_timeout")
    }
    named["engine.rank_timeout"] = config.engine.rank_timeout
    named["workload.rate"] = config.workload.rate
    options = config.router.grpc_options
    named |= {f"router.grpc_options.{key}": getattr(options, key) for key in _GRPC_CLOCKS}
    for key, value in named.items():
        if value is not None and value <= 0 and key != "clocks.lame_duck":
            found[key] = "is 0, but must be more than 0"
    if clocks.dead_after <= clocks.heartbeat and "clocks.dead_after" not in found:
        found["clocks.dead_after"] = (
            f"is {show_duration(clocks.dead_after)}, but must be longer than clocks.heartbeat "
            f"({show_duration(clocks.heartbeat)}), or every worker counts as dead"
        )
    if clocks.lame_duck > cluster.stop_grace / 2:
        found["clocks.lame_duck"] = (
            f"is {show_duration(clocks.lame_duck)}, but must be at most half of cluster.stop_grace "
            f"({show_duration(cluster.stop_grace)}): the other half is for the answers that run"
        )
    return found


def model_mistakes(config: Config, heads: int) -> dict[str, str]:
    """What the model's own shape forbids: more ranks than query heads."""
    return {
        f"pools.{name}.tensor_parallel": f"is {pool.tensor_parallel}, but the model has only {heads} query heads"
        for name, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode))
        if pool.tensor_parallel > heads
    }


def model_warnings(config: Config, kv_heads: int) -> list[str]:
    """What works but costs: KV heads that do not divide evenly over the ranks, or are held twice."""
    found: list[str] = []
    for name, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode)):
        ranks, key = pool.tensor_parallel, f"pools.{name}.tensor_parallel"
        if ranks > kv_heads:
            found.append(
                f"{key}: {ranks} ranks share {kv_heads} KV heads, so each head's KV is held about "
                f"{ranks / kv_heads:.1f} times"
            )
        elif kv_heads % ranks:
            most = -(-kv_heads // ranks)
            found.append(
                f"{key}: {kv_heads} KV heads over {ranks} ranks is uneven; the fullest rank has {most}, so the worker "
                f"runs at {kv_heads / (most * ranks):.0%} of an even split"
            )
    return found
