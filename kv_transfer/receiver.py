"""A decode rank's end: listens for links, knows which legs are expected, and places what they bring.

Only frames of an expected leg, presented with its ticket, are placed. Each leg has a lock: a link holds it while it
checks, writes to the pool and records; `forget` takes it too, so nothing is written after `forget` has returned.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..proto.errors import TransferFailed
from ..proto.kv_layout import KVLayout, block_count
from .block_store import BlockStore
from .events import LegKey, ReceiveEvent
from .handoff import ReceiveLeg
from .params import TransferParams
from .placement import ExpectedLeg
from .plan import Box
from .receive_link import ReceiveLink
from .ticket import TicketBook

_log = logging.getLogger(__name__)
_MAX_LINKS = 1024
_REMEMBERED_LEGS = 1 << 14


class Receiver:
    """One per decode rank. Thread-safe. Listens on `params.host` only, at a free port: see `address`.

    For each expected leg, `on_event` gets at most one of RankComplete, ReceiveFailed before completion, and Abandoned;
    on rank 0 also FirstTokensArrived, and ReceiveFailed may follow RankComplete while those are missing. An event that
    was already being delivered can still come after `forget`. Raises OSError when the host cannot be listened on and
    ValueError for a rank that the layout lacks.
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
        self._changed = threading.Condition()
        self._legs: dict[LegKey, ExpectedLeg] = {}
        self._forgotten: OrderedDict[LegKey, None] = OrderedDict()
        self._links: set[ReceiveLink] = set()
        self._closed = False
        self._listener = _listen(params.host)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def expect(self, leg: LegKey, nonce: bytes, blocks: Sequence[int], tokens: tuple[int, int]) -> None:
        """Place frames of this leg from now on: tokens [start, stop) of the sequence, all layers, this rank's heads.

        `nonce` is that of the leg's ticket. `blocks[i]` holds sequence tokens [i * block_size, (i + 1) * block_size).
        Raises ValueError for a leg that is or was expected, a range that is negative, or too few blocks.
        """
        if not 0 <= tokens[0] <= tokens[1]:
            raise ValueError(f"tokens {tokens} are not a range")
        if len(blocks) < block_count(tokens[1], self.layout.block_size):
            raise ValueError(f"{len(blocks)} blocks of {self.layout.block_size} for {tokens[1]} tokens")
        expected = Box(tokens, (0, self.layout.layers), self.layout.head_ranges[self.rank])
        with self._changed:
            if leg in self._legs or leg in self._forgotten:
                raise ValueError(f"leg {leg} was expected before")
            handoff = ReceiveLeg(expected, wants_first_tokens=self.rank == 0)
            self._legs[leg] = ExpectedLeg(leg, nonce, tuple(blocks), handoff)
            self._changed.notify_all()

    def forget(self, leg: LegKey) -> None:
        """Nothing is written to the leg's blocks after this has returned. No error for an unknown leg."""
        with self._changed:
            expected = self._legs.pop(leg, None)
            self._forgotten[leg] = None
            while len(self._forgotten) > _REMEMBERED_LEGS:
                self._forgotten.popitem(last=False)
            self._changed.notify_all()
        if expected is not None:
            with expected.lock:
                expected.handoff.end("forget")

    def close(self) -> None:
        """Stop listening, end all links and wait for their threads. No leg is written to afterwards."""
        with self._changed:
            self._closed = True
            links = list(self._links)
            legs = list(self._legs)
        _shut(self._listener)
        self._acceptor.join(self.params.frame_timeout_s)
        for leg in legs:
            self.forget(leg)
        for link in links:
            link.stop()
        for link in links:
            link.join(self.params.frame_timeout_s)

    # From here on: called by links.

    def leg(self, key: LegKey, nonce: bytes) -> ExpectedLeg:
        """The expected leg that a verified ticket is for.

        The ticket may be here before the worker's own order to this rank: waits a while for that. Raises
        TransferFailed when the leg is over, never comes, or was reserved anew under another ticket.
        """
        deadline = time.monotonic() + self.params.frame_timeout_s / 2
        with self._changed:
            while key not in self._legs:
                left = deadline - time.monotonic()
                if key in self._forgotten or self._closed or left <= 0:
                    raise TransferFailed(f"leg {key} is not expected here (any more)")
                self._changed.wait(left)
            expected = self._legs[key]
        if expected.nonce != nonce:
            raise TransferFailed(f"the ticket for leg {key} is not the one of its reservation")
        return expected

    def known_leg(self, key: LegKey) -> ExpectedLeg | None:
        """The expected leg, if it is there now."""
        with self._changed:
            return self._legs.get(key)

    def link_ended(self, link: ReceiveLink) -> None:
        """A link's thread is about to end."""
        with self._changed:
            self._links.discard(link)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                _log.exception("accepting a KV link failed")
                time.sleep(0.1)
                continue
            with self._changed:
                welcome = not self._closed and len(self._links) < _MAX_LINKS
                if welcome:
                    link = ReceiveLink(self, connection)
                    self._links.add(link)
            if welcome:
                link.start()
            else:
                connection.close()


def _listen(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _shut(listener: socket.socket) -> None:
    """Close a listener and release a thread that waits in accept."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:  # some systems refuse this on a listener; closing is then enough
        pass
    finally:
        listener.close()
