"""A rank process that computes nothing: reports what a leader reports, then waits. `BATON_FAKE_RANK` changes it:
`fail` (a failure), `config` (a mistake in the configuration), `exit` (dies), `stubborn` (ignores stop)."""

from __future__ import annotations

import os
import threading
from typing import Any

from baton.cluster.child import Report, run_child


def _main(values: dict[str, Any], report: Report, stop: threading.Event) -> None:
    mode = os.environ.get("BATON_FAKE_RANK", "")
    if mode == "fail":
        raise RuntimeError("the fake rank failed")
    if mode == "config":
        from baton.proto.errors import ConfigError

        raise ConfigError("model.path: a mistake")
    if mode == "exit":
        os._exit(7)
    print("what a library prints")
    if values["rank"] == 0:
        report("channel", {"address": "127.0.0.1:1"})
        report("loading", {"done": 1, "total": 2})
    report("ready", {"address": "127.0.0.1:2", "pid": os.getpid(), "leader": values["leader"]})
    stop.wait()
    if mode == "stubborn":
        threading.Event().wait()


if __name__ == "__main__":
    run_child(_main)
