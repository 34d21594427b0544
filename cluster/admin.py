"""`baton status`, `drain`, `scale` and `role`: short calls to the admin service of a running cluster; the story of one
request comes from its router, whose address the admin service knows."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import grpc
from rich.console import Console
from rich.table import Table

from ..proto import control_pb2 as pb
from ..proto.control_pb2_grpc import AdminStub
from ..proto.errors import ConfigError
from ..proto.peer_tls import PeerTLS, blocking_channel
from .access import NOBODY, Access
from .failures import KEY_HINT
from .output import results, say
from .units import split_address

_QUICK_S = 5.0
_FILE_WIDTH = 200


def _call(address: str, method: str, request: Any, timeout_s: float | None, tls: PeerTLS | None) -> Any:
    """The answer, or None after the reason was printed. Raises ConfigError for an address that is none."""
    try:
        split_address(address)
    except ValueError as error:
        raise ConfigError(f"--address: {address}: {error}") from None
    with blocking_channel(address, tls) as channel:
        try:
            return getattr(AdminStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failed: Any = error
            print(f"baton: {_reason(failed, address)}", file=sys.stderr)
            return None


def _reason(failed: Any, address: str) -> str:
    """What went wrong, for people."""
    if failed.code() == grpc.StatusCode.UNAVAILABLE:
        return f"no admin service answers at {address}: {failed.details()}"
    if failed.code() == grpc.StatusCode.UNIMPLEMENTED and "Method not found" in failed.details():
        return f"{address} is not the admin port of a cluster (router.admin): {failed.details()}"
    return str(failed.details())


def show_status(address: str, as_json: bool, tls: PeerTLS | None = None) -> int:
    """The workers, as a table or as JSON. Returns the exit code."""
    answer = _call(address, "Status", pb.StatusRequest(), _QUICK_S, tls)
    if answer is None:
        return 1
    if as_json:
        say(json.dumps(status_fields(answer)))
        return 0
    with results() as file:
        print_status(answer, Console(file=file, highlight=False, soft_wrap=True))
    return 0


def show_story(
    address: str, request_id: str, as_json: bool, tls: PeerTLS | None = None, access: Access = NOBODY
) -> int:
    """What happened to one request, as its router tells it. Returns the exit code."""
    answer = _call(address, "Status", pb.StatusRequest(), _QUICK_S, tls)
    if answer is None:
        return 1
    router = next((endpoint.address for endpoint in answer.endpoints if endpoint.name == "http"), "")
    host, _, port = router.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    scheme = "http" if access.authority is None else "https"
    url = f"{scheme}://{host}:{port}/debug/requests/{quote(request_id, safe='')}"
    try:
        with urlopen(
            Request(url, headers=dict(access.headers)), timeout=_QUICK_S, context=access.context()
        ) as response:
            story = json.load(response)
    except HTTPError as error:
        known = "the router knows of no such request; it tells only who asks on its own host, and forgets old ones"
        reasons = {404: known, 401: f"the router tells nobody without a key: {KEY_HINT}"}
        print(f"baton: {request_id}: {reasons.get(error.code, error)}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"baton: no router answers at {router}: {error}", file=sys.stderr)
        return 1
    say(json.dumps(story) if as_json else "\n".join([story["id"], *story["story"]]))
    return 0


def print_status(answer: pb.StatusResponse, console: Console) -> None:
    """The table fits 80 columns; where it does not, or nobody looks, nothing is cut but the node's name is folded."""
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    places = ", ".join(f"{endpoint.name} {endpoint.address}" for endpoint in answer.endpoints)
    console.print(f"{answer.model}, up {answer.uptime_s:.0f} s; {places}")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("worker", "state", "ranks", "restarts", "address", "incarnation"):
        table.add_column(heading, justify="right" if heading in ("ranks", "restarts") else "left", no_wrap=True)
    table.add_column("pid @ node", overflow="fold")
    for member in answer.view.members:
        place = f"{member.pid} @ {member.node}" if member.pid else "-"
        ranks, restarts = str(member.tensor_parallel), str(member.restarts)
        cells = (member.worker_id, member.state, ranks, restarts, member.address or "-", member.incarnation)
        table.add_row(*cells, place)
    console.print(table, soft_wrap=False)


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
    say(answer.message)
    return 0


def drain(address: str, worker_id: str, tls: PeerTLS | None = None) -> int:
    """Waits until the worker has stopped. Returns the exit code."""
    return _tell(_call(address, "Drain", pb.DrainRequest(worker_id=worker_id), None, tls))


def scale(address: str, pool: str, replicas: int, tls: PeerTLS | None = None) -> int:
    """Returns the exit code."""
    return _tell(_call(address, "Scale", pb.ScaleRequest(pool=pool, replicas=replicas), _QUICK_S, tls))


def set_role(address: str, worker_id: str, role: str, tls: PeerTLS | None = None) -> int:
    """Returns the exit code."""
    return _tell(_call(address, "SetRole", pb.SetRoleRequest(worker_id=worker_id, role=role), _QUICK_S, tls))
