"""`baton status`, `drain`, `scale` and `role`: short calls to the admin service of a running cluster."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from ..proto import control_pb2 as pb
from ..proto.control_pb2_grpc import AdminStub
from ..proto.errors import ConfigError
from .units import split_address

_QUICK_S = 5.0


def _call(address: str, method: str, request: Any, timeout_s: float | None) -> Any:
    """The answer, or None after the reason was printed. Raises ConfigError for an address that is none."""
    try:
        split_address(address)
    except ValueError as error:
        raise ConfigError(f"--address: {address}: {error}") from None
    with grpc.insecure_channel(address) as channel:
        try:
            return getattr(AdminStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failed: Any = error
            where = f"no admin service answers at {address}: " if failed.code() == grpc.StatusCode.UNAVAILABLE else ""
            print(f"baton: {where}{failed.details()}", file=sys.stderr)
            return None


def show_status(address: str, as_json: bool) -> int:
    """The workers, as a table or as JSON. Returns the exit code."""
    answer = _call(address, "Status", pb.StatusRequest(), _QUICK_S)
    if answer is None:
        return 1
    if as_json:
        print(json.dumps(status_fields(answer)))
        return 0
    console = Console(highlight=False)
    places = ", ".join(f"{endpoint.name} {endpoint.address}" for endpoint in answer.endpoints)
    console.print(f"{answer.model}, up {answer.uptime_s:.0f} s; {places}")
    table = Table()
    for heading in ("worker", "role", "state", "ranks", "pid @ node", "address", "restarts", "incarnation"):
        table.add_column(heading, justify="right" if heading in ("ranks", "restarts") else "left")
    for member in answer.view.members:
        place = f"{member.pid} @ {member.node}" if member.pid else "-"
        ranks, restarts = str(member.tensor_parallel), str(member.restarts)
        cells = (member.worker_id, member.role, member.state, ranks, place, member.address or "-", restarts)
        table.add_row(*cells, member.incarnation)
    console.print(table)
    return 0


def status_fields(answer: pb.StatusResponse) -> dict[str, Any]:
    """The answer as JSON values."""
    names = [field.name for field in pb.Member.DESCRIPTOR.fields]
    return {
        "model": answer.model,
        "uptime_s": answer.uptime_s,
        "version": answer.view.version,
        "endpoints": {endpoint.name: endpoint.address for endpoint in answer.endpoints},
        "workers": [{name: getattr(member, name) for name in names} for member in answer.view.members],
    }


def _tell(answer: Any) -> int:
    if answer is None:
        return 1
    print(answer.message)
    return 0


def drain(address: str, worker_id: str) -> int:
    """Waits until the worker has stopped. Returns the exit code."""
    return _tell(_call(address, "Drain", pb.DrainRequest(worker_id=worker_id), None))


def scale(address: str, pool: str, replicas: int) -> int:
    """Returns the exit code."""
    return _tell(_call(address, "Scale", pb.ScaleRequest(pool=pool, replicas=replicas), _QUICK_S))


def set_role(address: str, worker_id: str, role: str) -> int:
    """Returns the exit code."""
    return _tell(_call(address, "SetRole", pb.SetRoleRequest(worker_id=worker_id, role=role), _QUICK_S))
