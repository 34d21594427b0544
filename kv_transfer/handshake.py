"""What a decode rank checks before it accepts a link: protocol version, ticket, incarnation, and the two KV layouts."""

from __future__ import annotations

from typing import Any, Protocol

from ..proto.errors import Incompatible, TransferFailed
from ..proto.kv_layout import KVLayout
from .compat import differences
from .plan import Range, shares
from .ticket import TicketBook
from .wire import VERSION, field


class HelloOwner(Protocol):
    """The decode rank that is spoken to."""

    @property
    def worker_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def tickets(self) -> TicketBook: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def rank(self) -> int: ...


def checked_hello(hello: dict[str, Any], owner: HelloOwner) -> tuple[int, tuple[Range, ...]]:
    """The prefill rank that says hello, and the heads that it will send here.

    Raises TransferFailed or Incompatible with the reason to refuse with, WireError when a field is missing.
    """
    if hello.get("version") != VERSION:
        raise Incompatible(f"KV transfer version: prefill has {hello.get('version')!r}, decode has {VERSION}")
    if (called := field(hello, "incarnation", str)) != owner.incarnation:
        raise TransferFailed(f"prefill calls incarnation {called}, this is {owner.worker_id} {owner.incarnation}")
    owner.tickets.verify(field(hello, "ticket", bytes), owner.worker_id, owner.incarnation)
    try:
        theirs = KVLayout.unpack(field(hello, "layout", bytes))
    except ValueError as error:
        raise TransferFailed(str(error)) from error
    if found := differences(theirs, owner.layout):
        raise Incompatible("prefill and decode KV cannot be converted: " + "; ".join(found))
    rank = field(hello, "rank", int)
    if not 0 <= rank < theirs.tensor_parallel:
        raise TransferFailed(f"prefill rank {rank} of {theirs.tensor_parallel}")
    plan = shares(theirs.head_ranges, owner.layout.head_ranges, owner.layout.kv_heads)
    return rank, plan.get((rank, owner.rank), ())
