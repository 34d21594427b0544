"""One end of a transfer as a process of its own, driven by lines of JSON on stdin and reporting events on stdout.

`python -m baton.tests.harness.kv_peer decode|prefill TRANSPORT [FRAME_TIMEOUT]`. Both ends use the layout of `SHAPE`;
prefill's pool is filled from a fixed seed, so that any process can tell what decode must hold.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from baton.kv_transfer.params import TransferParams
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import TicketBook
from baton.tests.harness.kv_rig import PARAMS, FastStore, layout

SHAPE = layout([(0, 2)], layers=8, head_dim=64, block_size=16)
TOKENS = 2048
BLOCKS = list(range(TOKENS // 16))
LEG = ("request", 1, 0)

_out = threading.Lock()


def filled(store: FastStore) -> None:
    """The prefill pool's content."""
    store.data.copy_(torch.randn(store.data.shape, generator=torch.Generator().manual_seed(7)))


def say(**fields: Any) -> None:
    """Report one line."""
    with _out:
        print(json.dumps(fields), flush=True)


def _event(event: Any) -> None:
    fields = {name: getattr(event, name) for name in ("bytes", "frames") if hasattr(event, name)}
    error = getattr(event, "error", None)
    say(event=type(event).__name__, error=str(error) if error else "", **fields)


def main() -> None:
    """Serve until stdin ends."""
    logging.basicConfig(level=logging.INFO)
    role, limit = sys.argv[1], float(sys.argv[3])
    transport: Any = sys.argv[2]
    params: TransferParams = replace(
        PARAMS, transport=transport, frame_timeout_s=limit, frame_bytes=1 << 20, idle_close_s=60.0
    )
    store = FastStore(SHAPE, 0, len(BLOCKS))
    if role == "prefill":
        filled(store)
        sender = Sender(params, store, SHAPE, 0, _event)
    else:
        book = TicketBook(b"secret of the decode worker")
        receiver = Receiver(params, store, SHAPE, 0, "decode-0", "one", book, _event)
        say(address=receiver.address)
    for line in sys.stdin:
        order = json.loads(line)
        leg = (order["request"], 1, 0)
        if order["do"] == "reserve":
            ticket = book.issue(
                leg,
                worker_id="decode-0",
                incarnation="one",
                layout=SHAPE,
                addresses=(receiver.address,),
                cached_tokens=0,
                prompt_tokens=TOKENS,
                carrier=transport,
                lifetime_s=60.0,
            )
            receiver.expect(leg, ticket.nonce, BLOCKS, (0, TOKENS))
            say(ticket=ticket.pack().hex())
        elif order["do"] == "open":
            sender.open(leg, bytes.fromhex(order["ticket"]), BLOCKS, TOKENS)
        elif order["do"] == "computed":
            sender.computed(leg, tuple(order["tokens"]), (0, SHAPE.layers))
        elif order["do"] == "finish":
            sender.finish(leg, b"first")
        elif order["do"] == "placed":
            say(placed=bool(store.data.any()))
        elif order["do"] == "compare":
            want = FastStore(SHAPE, 0, len(BLOCKS))
            filled(want)
            say(equal=bool(torch.equal(want.data, store.data)))


if __name__ == "__main__":
    main()
