"""A process that ends with the test that started it, also when that is killed: `tied(command)` in place of `command`.

It keeps its pid. The kernel watches the thread that started it: start it from one that lives as long as it should.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from baton.cluster.processes import die_with_parent


def tied(command: Sequence[str]) -> list[str]:
    """What to run instead."""
    return [sys.executable, "-m", "baton.tests.harness.tied", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))  # outlives exec
    os.execv(sys.argv[2], sys.argv[2:])
