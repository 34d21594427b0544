"""Named points where tests hold, delay or break a process; free of cost unless BATON_FAILPOINTS is set.

`BATON_FAILPOINTS="prefill.chunk=sleep(0.2);prefill.first_frame=gate"` is read once at import. Actions:

- `sleep(S)`   wait S seconds each time
- `exit`       end the process at once, as `kill -9` would
- `raise`      raise InternalError
- `gate`       wait while the file $BATON_GATES/<point> exists; create $BATON_GATES/<point>.reached first
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .errors import InternalError

_POLL_S = 0.005


def _parse(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(";") if part)


_ACTIONS = _parse(os.environ.get("BATON_FAILPOINTS", ""))
_GATES = Path(os.environ.get("BATON_GATES", "."))


def reach(point: str) -> None:
    """Do what the environment asks of this point (nothing, in production). Blocks; never call it on an event loop."""
    if not _ACTIONS:
        return
    action = _ACTIONS.get(point)
    if action is None:
        return
    if action == "exit":
        os._exit(137)
    if action == "raise":
        raise InternalError(f"failpoint {point}")
    if action == "gate":
        (_GATES / f"{point}.reached").touch()
        while (_GATES / point).exists():
            time.sleep(_POLL_S)
    elif action.startswith("sleep("):
        time.sleep(float(action[6:-1]))
    else:
        raise InternalError(f"failpoint {point}: unknown action {action!r}")
