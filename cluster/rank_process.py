"""One worker rank as a plain process: `python -m baton.cluster.rank_process`, specification on stdin (child.py)."""

from __future__ import annotations

import threading
from typing import Any

from .child import Report, run_child
from .rank_runtime import run_rank
from .spec import spec_from_json


def _main(values: dict[str, Any], report: Report, stop: threading.Event) -> None:
    run_rank(spec_from_json(values), "127.0.0.1", report, stop)


if __name__ == "__main__":
    run_child(_main)
