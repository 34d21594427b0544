"""A prefill and a decode engine on one device, in two processes, with KV handed over by the product's own transfer.

On a GPU by `cuda_ipc` (NCCL refuses two ranks on one device: there it only starts, alone); else by shared memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from baton.engine.step import DRAWN_BY_LEADER, Draw, SequenceStep
from baton.kv_transfer.events import FirstTokensArrived, LegKey, RankComplete, Sent
from baton.kv_transfer.loopback import nccl_alone
from baton.kv_transfer.params import TransferParams
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import TicketBook
from baton.proto.kv_layout import block_count

from .gpu_model import RandomRunner
from .gpu_setup import Row, Setup, Shape, setup

_SMALL = Shape(16, 2048, 8192, 32, 8, 64, 128256)  # that of Llama-3.2-1B: two of them fit beside each other
_LEGS, _TOKENS, _WAIT_S = 3, 4, 120.0
_HOST = "127.0.0.1"


def pair(at: Setup, device: str) -> Iterator[Row]:
    """Prompts handed over; the median of all but the first, and whether the answers are those of one engine."""
    tokens = max(at.sizes.prompts)
    own = _runner(at, tokens)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = Sender(_params(device), own.kv, own.layout, 0, events.put)
    code = "import sys; from baton.benchmarks.gpu_pair import decode_end; decode_end(*sys.argv[1:])"
    command = [sys.executable, "-c", code, device, str(tokens)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        legs = [_hand_over(own, sender, events, child, index, tokens) for index in range(_LEGS)]
        moved, exposed, rate = sorted(legs[1:])[0]
        carrier = "cuda_ipc" if at.on_gpu else "shm"
        yield Row("pair", f"hand-over by {carrier}", f"{tokens} tokens", exposed, 1e3 * exposed, "ms after prefill")
        yield Row("pair", f"rate of {carrier}", f"{moved} B", None, rate / 1e9, "GB/s")
        yield Row("pair", "same tokens as one engine", f"{_LEGS} legs", None, 0.0, "differences", 1.0, 1.0)
    finally:
        sender.close()
        child.kill()
        child.communicate()
    if at.on_gpu:
        nccl_alone(_HOST, 20.0)
        yield Row("pair", "NCCL alone", "sum of one rank", None, 0.0, "errors", 1.0, 1.0)


def decode_end(device: str, tokens: str) -> None:
    """The child: for each leg a ticket on stdout, and what the engine says after the hand-over."""
    at, prompt = setup(device, quick=True), int(tokens)
    runner, book = _runner(at, prompt), TicketBook(os.urandom(16))
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    receiver = Receiver(_params(device), runner.kv, runner.layout, 0, "decode", "one", book, events.put)
    blocks = list(range(block_count(prompt + _TOKENS, 16)))[::-1]
    for index in range(_LEGS):
        leg: LegKey = (f"leg {index}", 1, 0)
        ticket = book.issue(
            leg,
            worker_id="decode",
            incarnation="one",
            layout=runner.layout,
            addresses=(receiver.address,),
            cached_tokens=0,
            prompt_tokens=prompt,
            carrier="auto",
            lifetime_s=_WAIT_S,
        )
        receiver.expect(leg, ticket.nonce, blocks, (0, prompt))
        print(json.dumps({"ticket": ticket.pack().hex()}), flush=True)
        found: dict[type, Any] = {}
        while not {RankComplete, FirstTokensArrived} <= found.keys():
            event = events.get(timeout=_WAIT_S)
            found[type(event)] = event
        first = int(found[FirstTokensArrived].payload)
        print(json.dumps({"tokens": _continue(runner, blocks, _prompt(prompt, index), first)}), flush=True)
    sys.stdin.readline()
    receiver.close()


def _hand_over(
    own: RandomRunner,
    sender: Sender,
    events: queue.SimpleQueue[Any],
    child: subprocess.Popen[str],
    index: int,
    tokens: int,
) -> tuple[int, float, float]:
    """(bytes, seconds from the first token to the last acknowledgement, bytes per second). Raises RuntimeError."""
    leg: LegKey = (f"leg {index}", 1, 0)
    prompt, blocks = _prompt(tokens, index), list(range(block_count(tokens + _TOKENS, 16)))
    sender.open(leg, bytes.fromhex(_said(child)["ticket"]), blocks[: block_count(tokens, 16)], tokens)
    draw = Draw(dataclasses.replace(DRAWN_BY_LEADER.params), (0,), prompt, [])
    step = SequenceStep("pair", 1, 0, prompt, 0, blocks, draw)
    ((first,),) = own.prefill([step], lambda low, high: sender.computed(leg, (0, tokens), (low, high)))
    drawn_at = time.monotonic()
    sender.finish(leg, str(first.token_id).encode())
    event = events.get(timeout=_WAIT_S)
    if not isinstance(event, Sent):
        raise RuntimeError(f"the hand-over failed: {event}")
    exposed = time.monotonic() - drawn_at
    theirs, ours = _said(child)["tokens"], _continue(own, blocks, prompt, first.token_id)
    if theirs != ours:
        raise RuntimeError(f"the decode engine says {theirs}, one engine alone {ours}")
    return event.bytes, exposed, event.bytes / max(event.ended_at - event.started_at, 1e-9)


def _continue(runner: RandomRunner, blocks: Sequence[int], prompt: list[int], first: int) -> list[int]:
    said = [first]
    for _ in range(_TOKENS - 1):
        draw = Draw(DRAWN_BY_LEADER.params, (0,), prompt, list(said))
        step = SequenceStep("pair", 1, 0, [said[-1]], len(prompt) + len(said) - 1, blocks, draw)
        ((token,),) = runner.decode([step])
        said.append(token.token_id)
    return said


def _said(child: subprocess.Popen[str]) -> dict[str, Any]:
    line = child.stdout.readline() if child.stdout else ""
    if not line:
        raise RuntimeError("the decode engine's process ended")
    found: dict[str, Any] = json.loads(line)
    return found


def _prompt(tokens: int, index: int) -> list[int]:
    return [(7 * at + 31 * index) % 300 for at in range(tokens)]


def _runner(at: Setup, tokens: int) -> RandomRunner:
    small = dataclasses.replace(at.sizes, model=_SMALL) if at.on_gpu else at.sizes
    scaled = dataclasses.replace(at, sizes=small)
    longest = tokens + _TOKENS
    return RandomRunner(
        scaled, block_count(longest, 16) + 1, longest, seed=3, layer_group=max(1, small.model.layers // 4)
    )


def _params(device: str) -> TransferParams:
    return TransferParams(
        host=_HOST,
        connect_timeout_s=30.0,
        frame_timeout_s=20.0,
        idle_close_s=60.0,
        transport="cuda_ipc" if device == "cuda" else "shm",
        wire="raw",
        tls=None,
        max_links=4,
        checksum=False,
        max_outstanding=2,
        frame_bytes=4 << 20,
    )
