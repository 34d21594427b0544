"""The product with one mistake in it, each of a kind made elsewhere before: the simulation must find them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from baton.decode_worker.effects import Forget, Send
from baton.decode_worker.intake import Intake, Reservation
from baton.decode_worker.legs import DecodeLegs
from baton.decode_worker.outgoing import Outgoing
from baton.decode_worker.prompts import Prompts
from baton.engine.block_pool import BlockPool
from baton.engine.prefix_feed import PrefixFeed
from baton.prefill_worker.effects import FinishTransfer
from baton.prefill_worker.legs import PrefillLegs
from baton.proto import worker_pb2 as pb
from baton.router.ledger import Ledger

from .receive_link import Receiver


def _still_expected(self: Any, key: Any) -> Any:
    """The receiver is not told that a reservation is gone."""
    return [effect for effect in _cancel(self, key) if not isinstance(effect, Forget)]


def _frees_early(self: Any, *arguments: Any) -> Any:
    """The prompt's blocks are given back when it is computed, although they are still being sent."""
    effects = _computed(self, *arguments)
    for effect in effects:
        if isinstance(effect, FinishTransfer):
            entry = self._legs[effect.leg]
            self.pool.release(entry.blocks)
            entry.blocks = []
    return effects


def _moves_on_paper(self: Any, *arguments: Any) -> Any:
    """The blocks of a choice that moves are given back when the decode worker is told to send them."""
    effects = _hand_over(self, *arguments)
    for effect in effects:
        if isinstance(effect, Send):
            self._pool.release(effect.blocks)
            next(iter(self._of(effect.leg))).table = []
    return effects


def _first_is_enough(self: Any, reservation: Reservation) -> Reservation | None:
    """Committed with the first tokens, whether all KV is here or not."""
    return reservation if reservation.first is not None else None


def _keeps_hash(self: Any) -> int:
    """A recycled block can still be found under what it held before."""
    block, _ = self._evictable.popitem(last=False)
    return int(block)


def _unsalted_match(self: Any, tokens: Sequence[int], salt: str) -> Any:
    return _match(self, tokens, "")


def _unsalted_publish(self: Any, blocks: Sequence[int], tokens: Sequence[int], salt: str) -> None:
    _publish(self, blocks, tokens, "")


def _says_twice(self: Any, token: pb.Token) -> list[pb.Token]:
    """A token that was said before is said again."""
    if token.index < len(self.token_ids) and not self.finished:
        return [token]
    return _accept(self, token)


def _cancels_on_paper(self: Any, key: Any) -> Any:
    """A cancelled reservation is forgotten, and its blocks with it."""
    with mock.patch.object(BlockPool, "release"):
        return _cancel(self, key)


_computed, _accept, _hand_over = PrefillLegs.computed, Ledger.accept, Outgoing.hand_over
_match, _publish, _cancel = BlockPool.match, BlockPool.publish, DecodeLegs.cancel

_BROKEN: dict[str, list[tuple[type, str, object]]] = {
    "the receiver ignores attempts": [(Receiver, "ignores_attempts", True)],
    "prefill frees before the acknowledgement": [(PrefillLegs, "computed", _frees_early)],
    "decode frees what it still sends": [(Outgoing, "hand_over", _moves_on_paper)],
    "decode commits without all KV": [(Intake, "_if_complete", _first_is_enough)],
    "late frames are still placed": [(DecodeLegs, "cancel", _still_expected)],
    "a recycled block keeps its hash": [(BlockPool, "_evict", _keeps_hash), (BlockPool, "check", lambda pool: None)],
    "prefix caches ignore the salt": [(BlockPool, "match", _unsalted_match), (BlockPool, "publish", _unsalted_publish)],
    "the ledger repeats tokens": [(Ledger, "accept", _says_twice)],
    "a cancel leaks the reservation": [(DecodeLegs, "cancel", _cancels_on_paper)],
    "evictions are not told": [(PrefixFeed, "removed", lambda feed, digest: None)],
    "decode computes prompts for those that left": [(Prompts, "forget", lambda prompts, key: None)],
    "legs outlive their session": [(DecodeLegs, "session_ended", lambda legs, session: [])],
}
NAMES = list(_BROKEN)
_RARE = {"the receiver ignores attempts": 2600}  # where to begin, as it shows in few seeds


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Within it, the product has this mistake."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, instead in _BROKEN[name]:
            stack.enter_context(mock.patch.object(owner, attribute, instead))
        yield


def seeds_until_found(name: str, limit: int, fails: Callable[[int], bool]) -> int:
    """How many seeds are tried before one finds the mistake; `limit` when none of so many does."""
    first = _RARE.get(name, 0)
    with broken(name):
        return next((tried for tried in range(limit) if fails(first + tried)), limit)
