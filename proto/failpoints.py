"""Named points where tests hold, delay, damage or end a process; free of cost unless BATON_FAILPOINTS is set.

`BATON_FAILPOINTS="prefill.chunk=sleep(0.2);prefill.frame[prefill-1]=exit@3"` is read once, when a process starts. Each
entry is `point=action`; `point[process]` is for one process only: a worker id (its rank 0), a worker id with a rank
("decode-0.1"), or "router". Behind an action, `*N` means the first N times, `@K` the K-th time only, and `?` whenever
the point's gate (see below) is closed.

| action | what happens |
|---|---|
| exit | the process ends at once, as `kill -9` would do it |
| stop | SIGSTOP: the process freezes until SIGCONT |
| raise | InternalError |
| sleep(S) | wait S seconds |
| gate | wait while the gate is closed: the file $BATON_GATES/<point>, or <point>[process], exists and is the same |
| corrupt | the caller damages what it holds; at points that can, see CORRUPTIBLE |
| via(HOST:PORT) | dial through that HTTP CONNECT proxy; at points that dial, see DIALLED |

Who waits at a gate is named in the file <point>.reached; the file <point>.pass lets one by. A point or an action that
does not exist is a ConfigError.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, InternalError

POINTS: dict[str, str] = {
    "router.handoff": "the router heard of a leg's first tokens and has not looked at them",
    "prefill.queued": "P was given a prompt and its ticket; nothing is allocated",
    "prefill.chunk": "a chunk was scheduled and is not computed",
    "prefill.chunk_done": "a chunk was computed and its result is not booked",
    "prefill.after_prefill": "the same, of a prompt's last chunk",
    "prefill.first_frame": "a leg's first parcel is about to be announced",
    "prefill.frame": "any parcel is about to be announced",
    "prefill.last_frame": "the parcel with a leg's last frame is about to be announced",
    "prefill.mid_frame": "D accepted a parcel; nothing of it is gathered",
    "prefill.half_payload": "half of an inline payload is written",
    "prefill.done": "the first tokens are drawn and not handed to the transfer",
    "prefill.sent": "a P rank knows that D has all of its part; nobody else knows",
    "prefill.released": "the router gave a leg's blocks back, and P has not freed them",
    "decode.reserved": "D holds blocks for a leg and has not told the router",
    "decode.mid_frame": "D accepted a parcel and has read nothing of it",
    "decode.payload": "a frame is here and not verified",
    "decode.frame": "a frame is verified and not placed",
    "decode.admit": "a rank has all KV of a leg, and that is not booked",
    "decode.committed": "a leg joined the batch, and the router does not know",
    "decode.step": "a step of the batch is about to run",
    "decode.step_done": "a step of the batch ran, and its tokens are not booked",
    "kv.dial": "a P rank dials a D rank",
}
CORRUPTIBLE = frozenset({"decode.payload"})
DIALLED = frozenset({"kv.dial"})

_ACTIONS = ("exit", "stop", "raise", "sleep(S)", "gate", "corrupt", "via(HOST:PORT)")
_POLL_S = 0.005
_ENTRY = re.compile(r"(?P<point>[\w.]+)(?:\[(?P<process>[\w.-]+)\])?=(?P<action>.+)")
_ACTION = re.compile(r"(?P<name>\w+)(?:\((?P<value>[^()]*)\))?(?:(?P<limit>[*@])(?P<count>[1-9]\d*)|(?P<asked>[?]))?")


@dataclass(slots=True)
class Rule:
    """One entry. `first`, `last`: at which of the times that the point is reached it acts; counted in `times`."""

    point: str
    process: str  # "": any
    action: str
    value: str
    first: int
    last: float
    asked: bool  # only while the point's gate is closed
    times: int = 0

    def due(self) -> bool:
        """Count one time. Whether the rule acts now."""
        if self.asked and all(closure is None for closure in _closures(self.point)):
            return False
        self.times += 1
        return self.first <= self.times <= self.last


def parse(text: str) -> dict[str, list[Rule]]:
    """The rules by point. Raises ConfigError."""
    rules: dict[str, list[Rule]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        rule = _rule(entry)
        rules.setdefault(rule.point, []).append(rule)
    return rules


def _rule(entry: str) -> Rule:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ConfigError(f"BATON_FAILPOINTS: {entry!r} is not point=action")
    point = found["point"]
    if point not in POINTS:
        raise ConfigError(f"BATON_FAILPOINTS: no point {point!r}{_nearest(point, list(POINTS))}")
    action = _ACTION.fullmatch(found["action"])
    name, value = (action["name"], action["value"]) if action else (found["action"], None)
    if action is None or not _fits(name, value):
        raise ConfigError(f"BATON_FAILPOINTS: {point}: no action {found['action']!r}{_nearest(name, list(_ACTIONS))}")
    for only, places in (("corrupt", CORRUPTIBLE), ("via", DIALLED)):
        if name == only and point not in places:
            raise ConfigError(f"BATON_FAILPOINTS: {point} cannot {name}; only {', '.join(sorted(places))} can")
    if point in DIALLED and name != "via":
        raise ConfigError(f"BATON_FAILPOINTS: {point} cannot {name}; it takes via(HOST:PORT)")
    count = int(action["count"] or 0)
    first = count if action["limit"] == "@" else 1
    return Rule(point, found["process"] or "", name, value or "", first, count or float("inf"), bool(action["asked"]))


def _fits(name: str, value: str | None) -> bool:
    if name == "sleep":
        return value is not None and re.fullmatch(r"\d+(\.\d+)?|\.\d+", value) is not None
    if name == "via":
        return value is not None and re.fullmatch(r".+:\d+", value) is not None
    return value is None and name in ("exit", "stop", "raise", "gate", "corrupt")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.4)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _from_environment() -> tuple[dict[str, list[Rule]], ConfigError | None]:
    try:
        return parse(os.environ.get("BATON_FAILPOINTS", "")), None
    except ConfigError as error:
        return {}, error


_RULES, _MISTAKE = _from_environment()
_GATES = Path(os.environ.get("BATON_GATES", "."))
_lock = threading.Lock()
_process = os.environ.get("BATON_WORKER", "")


def identify(process: str) -> None:
    """Say who this process is, for `point[process]`. Raises ConfigError for a mistake in BATON_FAILPOINTS."""
    global _process
    if _MISTAKE is not None:
        raise _MISTAKE
    _process = _process or process


def armed(point: str) -> bool:
    """Whether any rule here is for the point."""
    return bool(_RULES) and any(rule.process in ("", _process) for rule in _RULES.get(point, ()))


def reach(point: str) -> bool:
    """Do what the environment asks of this point; in production, nothing. True: damage what you hold.

    Blocks; `reach_async` is for event loops. Raises InternalError where the action is `raise`.
    """
    if not _RULES:
        return False
    damage = False
    for rule in _due(point):
        if rule.action == "gate":
            for _ in _waiting(point):
                time.sleep(_POLL_S)
        elif rule.action == "sleep":
            time.sleep(float(rule.value))
        else:
            damage |= _act(rule)
    return damage


async def reach_async(point: str) -> None:
    """`reach` on an event loop: what runs beside the caller goes on."""
    if not _RULES:
        return
    for rule in _due(point):
        if rule.action == "gate":
            for _ in _waiting(point):
                await asyncio.sleep(_POLL_S)
        elif rule.action == "sleep":
            await asyncio.sleep(float(rule.value))
        else:
            _act(rule)


def dial(point: str, address: tuple[str, int], limit_s: float) -> socket.socket:
    """A TCP connection to `address`, through a proxy where the environment asks for one. Raises OSError."""
    proxies = [rule.value for rule in _due(point)] if _RULES else []
    if not proxies:
        return socket.create_connection(address, limit_s)
    host, _, port = proxies[0].rpartition(":")
    connection = socket.create_connection((host, int(port)), limit_s)
    connection.sendall(f"CONNECT {address[0]}:{address[1]} HTTP/1.1\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            connection.close()
            raise ConnectionError(f"the proxy at {proxies[0]} closed the connection")
        answer += byte
    return connection


def _due(point: str) -> list[Rule]:
    with _lock:
        return [rule for rule in _RULES.get(point, ()) if rule.process in ("", _process) and rule.due()]


def _closures(point: str) -> list[str | None]:
    """What the files of the point's gates hold, None where one is open: each closing may write something else."""
    found: list[str | None] = []
    for name in (point, f"{point}[{_process}]"):
        try:
            found.append((_GATES / name).read_text())
        except FileNotFoundError:
            found.append(None)
    return found


def _waiting(point: str) -> Iterator[None]:
    """Goes on as long as the gate is closed; tells the other side who stands there."""
    closures = _closures(point)
    if any(closure is not None for closure in closures):
        note = _GATES / f".{point}.{os.getpid()}"
        note.write_text(f"{os.getpid()} {_process}")
        note.rename(_GATES / f"{point}.reached")
    while any(now is not None and now == then for now, then in zip(_closures(point), closures, strict=True)):
        try:
            (_GATES / f"{point}.pass").unlink()
            return
        except FileNotFoundError:
            yield


def _act(rule: Rule) -> bool:
    """`exit`, `stop`, `raise` or `corrupt`."""
    if rule.action == "exit":
        os._exit(137)
    if rule.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rule.action == "raise":
        raise InternalError(f"failpoint {rule.point}")
    return rule.action == "corrupt"
