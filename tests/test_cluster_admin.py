"""`baton status` for people: whole names in a pipe, and on a terminal of 80 columns."""

from __future__ import annotations

import io
import re

import pytest
from baton.cluster.admin import print_status
from baton.proto import control_pb2 as pb
from rich.console import Console


@pytest.mark.parametrize(("terminal", "node"), [(True, "node"), (True, "a-node-with-a-long-name"), (False, "n" * 70)])
def test_no_name_is_cut(terminal: bool, node: str) -> None:
    member = pb.Member(
        worker_id="prefill-10", state="starting", address="127.0.0.1:40799", incarnation="bb81e869cd35aedb"
    )
    member.pid, member.node = 1234567, node
    answer = pb.StatusResponse(view=pb.View(members=[member]), model="m")
    file = io.StringIO()
    print_status(answer, Console(file=file, width=80, force_terminal=terminal, highlight=False))
    lines = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in file.getvalue().splitlines()]
    row = next(number for number, line in enumerate(lines) if "prefill-10" in line)
    for whole in ("prefill-10", "starting", "127.0.0.1:40799", "bb81e869cd35aedb", "1234567 @"):
        assert whole in lines[row]
    if terminal:
        assert max(map(len, lines)) <= 80
        assert "".join(line[-12:].strip() for line in lines[row + 1 :]) in node  # folded, not cut
    else:
        assert lines[row].endswith(node)
