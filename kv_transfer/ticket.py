"""Tickets: what a decode worker hands out with a reservation, and checks when a prefill rank presents it.

A ticket tells the prefill worker where to send and what is lacking. It is signed with a secret that only the ranks of
the decode worker share; to everyone else it is opaque bytes. Each prefill rank may use it on one link, once, and only
while its reservation can still be waiting for KV. Times of issue are the decode worker's `time.time()`; whoever holds
a ticket may rely on its `lifetime_s` alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from ..proto.errors import TransferFailed
from ..proto.kv_layout import KVLayout
from .events import LegKey

MAX_TICKET_BYTES = 32 << 10
_MAC_BYTES = 32
_REMEMBERED_USES = 1 << 16
_END_OF_TIME = 1e12


@dataclass(frozen=True, slots=True)
class Ticket:
    """A reservation on a decode worker. `mac` is empty until signed."""

    request_id: str
    attempt: int
    first_choice: int
    worker_id: str  # of the decode worker
    incarnation: str
    layout: KVLayout
    addresses: tuple[str, ...]  # one per decode rank, host:port
    cached_tokens: int  # leading prompt tokens whose KV the decode worker holds
    prompt_tokens: int
    nonce: bytes
    carrier: str  # that the decode worker wants
    issued_at: float  # seconds since 1970, by the decode worker's clock
    lifetime_s: float  # from then on
    mac: bytes

    @property
    def leg(self) -> LegKey:
        """The leg that it was issued for."""
        return (self.request_id, self.attempt, self.first_choice)

    def body(self) -> bytes:
        """The signed part."""
        identity = [*self.leg, self.worker_id, self.incarnation, self.layout.pack(), self.addresses]
        numbers = [self.cached_tokens, self.prompt_tokens, self.nonce, self.carrier, self.issued_at, self.lifetime_s]
        return bytes(msgpack.packb([*identity, *numbers]))

    def pack(self) -> bytes:
        """As it travels: mac, then body."""
        return self.mac + self.body()

    @staticmethod
    def unpack(data: bytes) -> Ticket:
        """The inverse of `pack`; the mac is not checked here. Raises TransferFailed for anything else."""
        if not _MAC_BYTES < len(data) <= MAX_TICKET_BYTES:
            raise TransferFailed(f"not a ticket: {len(data)} bytes")
        try:
            fields: Any = msgpack.unpackb(data[_MAC_BYTES:])
            request, attempt, choice, worker, incarnation, layout, addresses, *rest = fields
            leg, target = (request, attempt, choice), (KVLayout.unpack(layout), tuple(addresses))
            cached, prompt, nonce, carrier, issued_at, lifetime_s = rest
            promise: Any = (cached, prompt, nonce, carrier, issued_at, lifetime_s, data[:_MAC_BYTES])
            return _typed(Ticket(*leg, worker, incarnation, *target, *promise))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransferFailed(f"not a ticket: {error}") from error


def _typed(ticket: Ticket) -> Ticket:
    texts = (ticket.request_id, ticket.worker_id, ticket.incarnation, ticket.carrier, *ticket.addresses)
    numbers = (ticket.attempt, ticket.first_choice, ticket.cached_tokens, ticket.prompt_tokens)
    if not all(type(text) is str for text in texts) or type(ticket.nonce) is not bytes:
        raise ValueError("a field has the wrong type")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a number is missing or negative")
    if not all(
        type(seconds) is float and 0 <= seconds < _END_OF_TIME for seconds in (ticket.issued_at, ticket.lifetime_s)
    ):
        raise ValueError("a time is missing or negative")
    if ticket.cached_tokens > ticket.prompt_tokens:
        raise ValueError(f"{ticket.cached_tokens} cached tokens of {ticket.prompt_tokens}")
    if len(ticket.addresses) != ticket.layout.tensor_parallel:
        raise ValueError(f"{len(ticket.addresses)} addresses for {ticket.layout.tensor_parallel} ranks")
    return ticket


class TicketBook:
    """Issues and redeems the tickets of one decode worker; every rank has one, made with the same secret.

    Thread-safe. `clock` tells seconds since 1970. Raises ValueError for a secret of less than 16 bytes.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(secret) < 16:
            raise ValueError("the secret of a ticket book needs 16 bytes or more")
        self._key = hashlib.blake2b(b"baton ticket", key=secret[:64]).digest()
        self._clock = clock
        self._used: OrderedDict[tuple[bytes, int, int], None] = OrderedDict()
        self._lock = threading.Lock()

    def issue(
        self,
        leg: LegKey,
        *,
        worker_id: str,
        incarnation: str,
        layout: KVLayout,
        addresses: tuple[str, ...],
        cached_tokens: int,
        prompt_tokens: int,
        carrier: str,
        lifetime_s: float,
    ) -> Ticket:
        """A signed ticket with a fresh nonce; hand `ticket.nonce` to every rank's `Receiver.expect`.

        `lifetime_s`: how long the reservation waits for the first sign of its KV.
        """
        nonce = secrets.token_bytes(16)
        tokens, times = (cached_tokens, prompt_tokens), (self._clock(), float(lifetime_s))
        unsigned = Ticket(*leg, worker_id, incarnation, layout, addresses, *tokens, nonce, carrier, *times, b"")
        return replace(unsigned, mac=self._sign(unsigned))

    def verify(self, data: bytes, worker_id: str, incarnation: str) -> Ticket:
        """The ticket, if it is ours, of this incarnation and still good. Raises TransferFailed with the reason."""
        ticket = Ticket.unpack(data)
        if not hmac.compare_digest(self._sign(ticket), ticket.mac):
            raise TransferFailed("the ticket is not signed by this decode worker")
        if (ticket.worker_id, ticket.incarnation) != (worker_id, incarnation):
            raise TransferFailed(
                f"the ticket is for {ticket.worker_id} incarnation {ticket.incarnation}, this is {worker_id} "
                f"incarnation {incarnation}"
            )
        if (late_s := self._clock() - ticket.issued_at - ticket.lifetime_s) > 0:
            raise TransferFailed(f"the ticket of {ticket.leg} expired {late_s:.1f} s ago")
        return ticket

    def redeem(self, data: bytes, worker_id: str, incarnation: str, ranks: tuple[int, int]) -> Ticket:
        """`verify`, and use it up for the link between (prefill, decode) `ranks`. Raises TransferFailed on a reuse."""
        ticket = self.verify(data, worker_id, incarnation)
        use = (ticket.nonce, *ranks)
        with self._lock:
            if use in self._used:
                raise TransferFailed(f"the ticket of {ticket.leg} was used before by prefill rank {ranks[0]}")
            self._used[use] = None
            if len(self._used) > _REMEMBERED_USES:
                self._used.popitem(last=False)
        return ticket

    def _sign(self, ticket: Ticket) -> bytes:
        return hmac.digest(self._key, ticket.body(), "sha256")
