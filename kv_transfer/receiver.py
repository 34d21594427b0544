"""A decode rank's end: listens for links, knows which legs are expected, and places what they bring.

Only frames of an expected leg, presented with its ticket, are placed. Each leg has a lock: a link holds it while it
checks, writes to the pool and records; `forget` takes it too, so nothing is written after `forget` has returned.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..proto.errors import Exhausted, TransferFailed
from ..proto.kv_layout import KVLayout, block_count
from .block_store import BlockStore
from .doorman import Doorman
from .events import LegKey, ReceiveEvent
from .handoff import ReceiveLeg
from .handshake import checked_hello
from .params import TransferParams
from .placement import ExpectedLeg
from .plan import Box
from .receive_link import ReceiveLink
from .ticket import TicketBook
from .tls import server_context
from .topology import place_here
from .wire import Wire

_log = logging.getLogger(__name__)
_MAX_LINKS = 1024
_REMEMBERED_LEGS = 1 << 14


class Receiver:
    """One per decode rank. Thread-safe. Listens on `params.host` only, at a free port: see `address`.

    For each expected leg, `on_event` gets at most one of RankComplete, ReceiveFailed before completion, and Abandoned;
    on rank 0 also FirstTokensArrived, and ReceiveFailed may follow RankComplete while those are missing. An event that
    was already being delivered can still come after `forget`. Raises OSError when the host cannot be listened on,
    ConfigError when a file of kv.tls cannot be used, and ValueError for a rank that the layout lacks.
    """

    def __init__(
        self,
        params: TransferParams,
        store: BlockStore,
        layout: KVLayout,
        rank: int,
        worker_id: str,
        incarnation: str,
        tickets: TicketBook,
        on_event: Callable[[ReceiveEvent], None],
    ) -> None:
        if not 0 <= rank < layout.tensor_parallel:
            raise ValueError(f"rank {rank} of {layout.tensor_parallel}")
        self.params = params
        self.store = store
        self.layout = layout
        self.rank = rank
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.tickets = tickets
        self.on_event = on_event
        self.place = place_here(store.device.type)
        self._lock = threading.Lock()
        self._legs: dict[LegKey, ExpectedLeg] = {}
        self._forgotten: OrderedDict[LegKey, ExpectedLeg | None] = OrderedDict()  # those that were complete, and others
        self._links: set[ReceiveLink] = set()
        self._closed = False
        self._doorman = Doorman(params.host, server_context(params.tls), params.connect_timeout_s, self._greet)
        self.address = self._doorman.address

    def expect(
        self,
        leg: LegKey,
        nonce: bytes,
        blocks: Sequence[int],
        tokens: tuple[int, int],
        *,
        wants_first_tokens: bool = True,
    ) -> None:
        """Place frames of this leg from now on: tokens [start, stop) of the sequence, all layers, this rank's heads.

        `nonce` is that of the leg's ticket; `wants_first_tokens`: on rank 0, the KV alone does not complete the leg.
        `blocks[i]` holds sequence tokens [i * block_size, (i + 1) * block_size).
        Raises ValueError for a leg that is or was expected, a range that is negative, or too few blocks.
        """
        if not 0 <= tokens[0] <= tokens[1]:
            raise ValueError(f"tokens {tokens} are not a range")
        if len(blocks) < block_count(tokens[1], self.layout.block_size):
            raise ValueError(f"{len(blocks)} blocks of {self.layout.block_size} for {tokens[1]} tokens")
        expected = Box(tokens, (0, self.layout.layers), self.layout.head_ranges[self.rank])
        with self._lock:
            if leg in self._legs or leg in self._forgotten:
                raise ValueError(f"leg {leg} was expected before")
            handoff = ReceiveLeg(expected, wants_first_tokens=wants_first_tokens and self.rank == 0)
            self._legs[leg] = ExpectedLeg(leg, nonce, tuple(blocks), handoff)

    def forget(self, leg: LegKey) -> None:
        """Nothing is written to the leg's blocks after this has returned. No error for an unknown leg."""
        with self._lock:
            expected = self._legs.pop(leg, None)
            whole = expected is not None and expected.handoff.state == "complete"
            self._forgotten[leg] = replace(expected, blocks=()) if whole and expected else self._forgotten.get(leg)
            while len(self._forgotten) > _REMEMBERED_LEGS:
                self._forgotten.popitem(last=False)
        if expected is not None:
            with expected.lock:
                expected.handoff.end("forget")

    def close(self) -> None:
        """Stop listening, end all links and wait for their threads. No leg is written to afterwards."""
        self._doorman.close(self.params.connect_timeout_s)
        with self._lock:
            self._closed = True
            links = list(self._links)
            legs = list(self._legs)
        for leg in legs:
            self.forget(leg)
        for link in links:
            link.stop()
        for link in links:
            link.join(self.params.frame_timeout_s)

    # From here on: called by links and the doorman.

    def leg(self, key: LegKey, nonce: bytes) -> ExpectedLeg | None:
        """The expected leg that a verified ticket is for; None when the worker's order has not come to this rank yet.

        One that was complete is known after `forget` too: the worker may have gone on before every source rank has
        said that it is done. Raises TransferFailed when the leg is over, or was reserved anew under another ticket.
        """
        with self._lock:
            expected = self._legs.get(key) or self._forgotten.get(key)
            if expected is None and (key in self._forgotten or self._closed):
                raise TransferFailed(f"leg {key} is not expected here any more")
        if expected is not None and expected.nonce != nonce:
            raise TransferFailed(f"the ticket for leg {key} is not the one of its reservation")
        return expected

    def known_leg(self, key: LegKey) -> ExpectedLeg | None:
        """The expected leg, if it is there now."""
        with self._lock:
            return self._legs.get(key)

    def link_ended(self, link: ReceiveLink) -> None:
        """A link's thread is about to end."""
        with self._lock:
            self._links.discard(link)

    def _greet(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Let a connection in that showed a valid ticket. Raises BatonError or WireError to refuse it."""
        if hello["kind"] != "hello":
            raise TransferFailed(f"a {hello['kind']} message came before the hello")
        agreement = checked_hello(hello, self)
        with self._lock:
            if self._closed or len(self._links) >= _MAX_LINKS:
                raise Exhausted(f"{_MAX_LINKS} links are open to this rank")
            link = ReceiveLink(self, Wire(connection, self.params.connect_timeout_s), agreement)
            self._links.add(link)
        try:
            link.start()
        except RuntimeError:  # no more threads
            self.link_ended(link)
            connection.setblocking(False)
            raise
