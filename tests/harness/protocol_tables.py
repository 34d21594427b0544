"""The tables of the protocol as docs/architecture.md has them: `python -m baton.tests.harness.protocol_tables`."""

from __future__ import annotations

from collections.abc import Iterable

from baton.decode_worker import intake_table
from baton.kv_transfer.handoff import RECEIVE, SEND
from baton.router import leg_table

BEGIN, END = "<!-- protocol tables: begin -->", "<!-- protocol tables: end -->"
Row = tuple[str, str, str, str]  # state, event, next state, actions


def leg_rows() -> list[Row]:
    """The life of a leg, at the router."""
    return [
        (state.value, event.value, rule.state.value, "; ".join(do.value for do in rule.actions))
        for (state, event), rule in leg_table.TABLE.items()
    ]


def intake_rows() -> list[Row]:
    """A leg's way into a decode worker."""
    return [(state.value, event.value, to.value, "") for (state, event), to in intake_table.TABLE.items()]


def handoff_rows(table: dict[tuple[str, str], str]) -> list[Row]:
    """One end of the handoff."""
    return [(state, event, to, "") for (state, event), to in table.items()]


def rendered() -> str:
    """The section's tables, between its marks."""
    parts = [
        BEGIN,
        _table("A leg, at the router (`router/leg_table.py`)", leg_rows()),
        _table("A leg's way into a decode worker (`decode_worker/intake_table.py`)", intake_rows()),
        _table("The handoff at a sending rank (`kv_transfer/handoff.py`)", handoff_rows(SEND)),
        _table("The handoff at a receiving rank (`kv_transfer/handoff.py`)", handoff_rows(RECEIVE)),
        END,
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: Iterable[Row]) -> str:
    """Events of one state with the same outcome share a line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for state, event, following, actions in rows:
        groups.setdefault((state, following, actions), []).append(event)
    lines = [
        f"| {state} | {', '.join(events)} | {following if following != state else '='} | {actions} |"
        for (state, following, actions), events in groups.items()
    ]
    return "\n".join([f"**{title}**", "", "| in | on | to | and |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(rendered(), end="")
