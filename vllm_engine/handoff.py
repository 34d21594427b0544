"""The hand-off ticket in a gateway's `kv_transfer_params_json`, in the dialect of the connector that we name.

A gateway calls prefill first and decode afterwards, and carries one JSON object from one to the other. Ours says who
computed the prompt. Decode then asks that worker for the same prompt, which it finds in its prefix cache, and gets
the KV over the ordinary way; so a ticket that is never used holds nothing, one that comes late or twice costs a prefill
at most, and a forged one can name no worker that the cluster's membership does not list.
"""

from __future__ import annotations

import json
from typing import TypeGuard

from ..proto.errors import InvalidRequest
from ..router.life_messages import Peer

CONNECTOR = "NixlConnector"  # makes the gateway mark the prefill leg
FIELD = "kv_transfer_params_json"
_MOST_BYTES = 1 << 16
_MOST_CHARS = 256


def read(text: str) -> tuple[bool, Peer | None]:
    """(whether this is the prefill leg of a pair, the worker that has the prompt's KV). Raises InvalidRequest."""
    if not text:
        return False, None
    if len(text) > _MOST_BYTES:
        raise InvalidRequest(f"{FIELD}: at most {_MOST_BYTES} bytes, got {len(text)}", field=FIELD)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{FIELD}: not a JSON object", field=FIELD) from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{FIELD}: not a JSON object", field=FIELD)
    if fields.get("do_remote_decode") is True:
        return True, None
    worker, incarnation = fields.get("remote_engine_id"), fields.get("remote_incarnation")
    if fields.get("do_remote_prefill") is not True or worker is None:
        return False, None
    if not (_is_name(worker) and _is_name(incarnation)):
        raise InvalidRequest(f"{FIELD}: remote_engine_id and remote_incarnation are not those of a ticket", field=FIELD)
    return False, Peer(worker, incarnation)


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _MOST_CHARS


def write(source: Peer, prompt_tokens: int) -> str:
    """The ticket of a prompt that `source` has computed."""
    return json.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": source.worker_id,
            "remote_incarnation": source.incarnation,
            "remote_block_ids": [],
            "prompt_tokens": prompt_tokens,
        }
    )
