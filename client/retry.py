"""Whether and when a failed call is tried again. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..proto.errors import BatonError


@dataclass(frozen=True, slots=True)
class Retry:
    """`attempts`: the first included. Without a hint of the router's the waits double, with jitter."""

    attempts: int = 3
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait_s(
        self, failed: int, error: BatonError, left_s: float | None, *, others: bool, rng: random.Random
    ) -> float | None:
        """Seconds until the next attempt; None: there is none.

        failed: attempts so far. left_s: until the caller's deadline. others: a router was not tried yet; it is at once.
        """
        if not error.retryable or failed >= self.attempts:
            return None
        if others:
            return 0.0
        backoff_s = min(self.longest_wait_s, self.first_wait_s * 2 ** (failed - 1))
        wait_s = error.retry_after_s or backoff_s * (1 - 0.5 * rng.random())
        return None if left_s is not None and wait_s >= left_s else wait_s
