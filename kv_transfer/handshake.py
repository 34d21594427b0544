"""The first exchange on a link: what a prefill rank says of itself, and what a decode rank checks before it accepts.

That is protocol version, ticket, incarnation, the two KV layouts and codecs; then both know which carrier to build.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..proto.errors import Incompatible, TransferFailed, from_wire
from ..proto.kv_layout import KVLayout
from .codec import wire_dtype
from .compat import codec_differences, differences
from .params import TransferParams
from .plan import Range, shares
from .ticket import TicketBook
from .topology import AUTO, INLINE, Place, choose
from .wire import VERSION, Wire, WireError, field


class HelloSender(Protocol):
    """The prefill rank that says hello."""

    @property
    def params(self) -> TransferParams: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> Place: ...


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the decode rank answered."""

    carrier: str
    checked: bool  # every frame has a checksum
    nonce: bytes  # of this link's canary


def say_hello(wire: Wire, owner: HelloSender, incarnation: str, ticket: bytes) -> Welcome:
    """Introduce a prefill rank to the decode rank of `incarnation`.

    Raises what the decode rank refused with, and WireError.
    """
    params = owner.params
    wire.send(
        "hello",
        version=VERSION,
        ticket=ticket,
        layout=owner.layout.pack(),
        rank=owner.rank,
        incarnation=incarnation,
        carrier=params.transport,
        place=owner.place.pack(),
        codec=params.wire,
        checksum=params.checksum,
    )
    answer = wire.receive()
    kind = answer["kind"] if isinstance(answer, dict) else "payload"
    if not isinstance(answer, dict) or kind not in ("welcome", "refused"):
        raise WireError(f"a {kind} message came before the handshake")
    if kind == "refused":
        raise from_wire(field(answer, "code", str), field(answer, "message", str))
    agreed = field(answer, "carrier", str)
    if agreed != INLINE and params.transport not in (agreed, AUTO):
        raise WireError(f"the peer chose carrier {agreed!r}")
    return Welcome(agreed, params.checksum or field(answer, "checksum", bool), field(answer, "canary", bytes))


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
    @property
    def params(self) -> TransferParams: ...
    @property
    def place(self) -> Place: ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a hello led to: how this link will be used."""

    source: int  # the prefill rank
    heads: tuple[Range, ...]  # that it will send here
    dtype: str  # element type of its payloads
    checked: bool  # every frame has a checksum
    carrier: str
    reason: str  # why the carrier is not what a side asked for; empty when it is


def checked_hello(hello: dict[str, Any], owner: HelloOwner) -> Agreement:
    """How a link that begins with this hello will be used.

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
    codec = owner.params.wire
    if found := differences(theirs, owner.layout) + codec_differences(
        field(hello, "codec", str), codec, (theirs.dtype, owner.layout.dtype)
    ):
        raise Incompatible("prefill and decode KV cannot be converted: " + "; ".join(found))
    rank = field(hello, "rank", int)
    if not 0 <= rank < theirs.tensor_parallel:
        raise TransferFailed(f"prefill rank {rank} of {theirs.tensor_parallel}")
    plan = shares(theirs.head_ranges, owner.layout.head_ranges, owner.layout.kv_heads)
    params = owner.params
    try:
        place = Place.unpack(hello.get("place"))
    except ValueError as error:
        raise TransferFailed(str(error)) from error
    asked = (field(hello, "carrier", str), place)
    return Agreement(
        rank,
        plan.get((rank, owner.rank), ()),
        wire_dtype(theirs.dtype, owner.layout.dtype, codec),
        params.checksum or field(hello, "checksum", bool),
        *choose(asked, (params.transport, owner.place), params.tls is not None),
    )
