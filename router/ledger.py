"""The tokens of one choice, each index once and in order, whichever worker's message came first."""

from __future__ import annotations

from ..proto import worker_pb2 as pb


class Ledger:
    """What one choice has said so far, over all its legs."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finished = False
        self.stopped_here = False  # ended by the router (stop string), not by a worker
        self._early: dict[int, pb.Token] = {}

    def accept(self, token: pb.Token) -> list[pb.Token]:
        """The tokens that are next in order now that `token` came; [] for a duplicate, a gap or a finished choice."""
        if self.finished or token.index < len(self.token_ids):
            return []
        if token.index > len(self.token_ids):
            self._early[token.index] = token
            return []
        ready: list[pb.Token] = []
        following: pb.Token | None = token
        while following is not None and not self.finished:
            self.token_ids.append(following.token_id)
            ready.append(following)
            self.finished = bool(following.finish_reason)
            following = self._early.pop(len(self.token_ids), None)
        return ready

    def goes_on(self, token: pb.Token) -> bool:
        """Takes the usual token: the next one, which ends nothing. False: nothing was done, `accept` must look."""
        if token.index != len(self.token_ids) or self.finished or self._early or token.finish_reason:
            return False
        self.token_ids.append(token.token_id)
        return True

    def forget_early(self) -> None:
        """Drops what came ahead of its turn: the leg that said it is over."""
        self._early.clear()

    def stop(self) -> bool:
        """Ends the choice by the router's decision; False when it had ended already."""
        if self.finished:
            return False
        self.finished = self.stopped_here = True
        return True
