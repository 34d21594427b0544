"""`--report`: where each phase ran and what it cost, as tables on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..client.completion import Completion
from ..proto import baton_pb2 as api
from .membership import Member
from .units import human_bytes

_FILE_WIDTH = 140
_PHASES = (
    "reserve",
    "prefill_queue",
    "prefill",
    "transfer",
    "transfer_exposed",
    "ttft",
    "first_gap",
    "decode",
    "total",
)


def print_report(completions: Sequence[Completion], members: Sequence[Member], start_s: float | None) -> None:
    """One table per request for up to four, else one of means; and what the start of the cluster took."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    timed = [(done, done.timing) for done in completions if done.timing is not None]
    if start_s is not None:
        console.print(f"cluster started in {start_s:.1f} s")
    if len(timed) <= 4:
        for done, timing in timed:
            console.print(_one(done, timing, members))
    else:
        console.print(_many(timed))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _place(name: str, members: Sequence[Member]) -> tuple[str, str]:
    """A worker's name, and its pid and node where they are known."""
    for member in members:
        if member.worker_id == name:
            return name, f"{member.pid} @ {member.node}"
    return name or "none", "-"


def _one(done: Completion, timing: api.Timing, members: Sequence[Member]) -> Table:
    usage = done.usage or api.Usage()
    rate = (usage.completion_tokens - len(done.choices)) / timing.decode_s if timing.decode_s > 0 else 0.0
    table = Table(title=f"request {done.request_id}", title_justify="left", min_width=70)
    for heading in ("phase", "worker", "pid @ node", "time", "details"):
        table.add_column(heading, justify="right" if heading == "time" else "left")
    prefill, decode = _place(timing.prefill_worker, members), _place(timing.decode_worker, members)
    cached = f"{timing.prefill_cached_tokens} cached"
    rows = [
        ("reserve", *decode, timing.reserve_s, f"{timing.decode_cached_tokens} prompt tokens cached there"),
        ("queue", *prefill, timing.prefill_queue_s, ""),
        ("prefill", *prefill, timing.prefill_s, f"{usage.prompt_tokens} prompt tokens, {cached}"),
        ("first token", "router", "-", timing.ttft_s, "time to first token"),
    ]
    moved = f"{human_bytes(timing.kv_bytes)} of KV in {timing.kv_frames} frames"
    hidden = f"{_milliseconds(timing.transfer_exposed_s)} not hidden behind prefill"
    if timing.decode_worker:
        pace = f"{rate:.1f}/s after the first; {_milliseconds(timing.first_gap_s)} from token 1 to 2"
        route = f"{timing.prefill_worker} -> {timing.decode_worker}"
        rows += [
            ("transfer", route, "-", timing.transfer_s, f"{moved}; {hidden}"),
            ("decode", *decode, timing.decode_s, f"{usage.completion_tokens} tokens, {pace}"),
        ]
    for phase, worker, place, seconds, details in rows:
        table.add_row(phase, worker, place, _milliseconds(seconds), details)
    extra = [f"{timing.attempts} attempts"] * (timing.attempts > 1) + [f"{timing.preemptions} preemptions"] * (
        timing.preemptions > 0
    )
    table.add_row("total", "", "", _milliseconds(timing.total_s), ", ".join(extra))
    return table


def _many(timed: Sequence[tuple[Completion, api.Timing]]) -> Table:
    table = Table(title=f"{len(timed)} requests", title_justify="left")
    for heading in ("phase", "mean", "longest"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in _PHASES:
        times = [float(getattr(timing, f"{phase}_s")) for _, timing in timed]
        table.add_row(phase.replace("_", " "), _milliseconds(sum(times) / len(times)), _milliseconds(max(times)))
    moved = sum(timing.kv_bytes for _, timing in timed)
    frames = sum(timing.kv_frames for _, timing in timed)
    table.caption = f"{human_bytes(moved)} of KV in {frames} frames"
    return table
