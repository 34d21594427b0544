"""The router process under cProfile, for `router.py --profile FILE`."""

from __future__ import annotations

import cProfile
import sys
import threading
from typing import Any

from baton.cluster.child import Report, run_child
from baton.cluster.router_process import main


def _profiled(values: dict[str, Any], report: Report, stop: threading.Event) -> None:
    profile = cProfile.Profile()
    try:
        profile.runcall(main, values, report, stop)
    finally:
        profile.dump_stats(sys.argv[1])


if __name__ == "__main__":
    run_child(_profiled)
