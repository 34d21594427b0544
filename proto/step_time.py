"""How long a step takes, as a law of three coefficients that a worker fits to its own recent steps.

    prefill   a + b * tokens + c * squares       squares: over the chunks [s, e), the sum of e^2 - s^2
    decode    a + b * sequences + c * context    context: KV tokens of all sequences

so that a prompt of n tokens, p of them cached, costs b * (n - p) + c * (n^2 - p^2), however it is cut, and a per step.
Workers report the coefficients, routers evaluate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

_MEMORY = 256.0  # steps that count: the weight of a step falls to 1/e after so many
_LEAST = 8  # steps before there is a law
_EVERY = 16  # steps after which it is made anew
_RIDGE = 1e-9  # relative; keeps features that never varied solvable
Features = tuple[float, float, float]


class StepTime(NamedTuple):
    """Coefficients in seconds, each 0 or more."""

    a: float
    b: float
    c: float

    def seconds(self, features: Features) -> float:
        """Of a step, or of several together, with these features."""
        return sum(coefficient * feature for coefficient, feature in zip(self, features, strict=True))


def prefill_features(chunks: Sequence[tuple[int, int]]) -> Features:
    """One step over the tokens [start, stop) of some prompts."""
    return 1.0, float(sum(e - s for s, e in chunks)), float(sum(e * e - s * s for s, e in chunks))


def decode_features(contexts: Sequence[int]) -> Features:
    """One step of sequences that hold so many tokens."""
    return 1.0, float(len(contexts)), float(sum(contexts))


class StepTimeFit:
    """Least squares of the *relative* error with coefficients of at least 0, over steps that fade; O(1) a step.

    Of the seven sets of coefficients that may be positive the best feasible one is taken, which solves so small a
    non-negative problem exactly.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._law: StepTime | None = None
        self._products = [[0.0] * 3 for _ in range(3)]  # sum of f f' / t^2
        self._targets = [0.0] * 3  # sum of f / t

    def observe(self, features: Features, seconds: float) -> None:
        """A step ran. Nothing is learned from one that took no time."""
        if seconds <= 0:
            return
        fade = 1.0 - 1.0 / _MEMORY
        scaled = [feature / seconds for feature in features]
        self._steps += 1
        for row in range(3):
            self._targets[row] = self._targets[row] * fade + scaled[row]
            for column in range(3):
                self._products[row][column] = self._products[row][column] * fade + scaled[row] * scaled[column]
        if self._steps == _LEAST or not self._steps % _EVERY:
            self._law = self._solution()

    @property
    def law(self) -> StepTime | None:
        """As of some steps ago; None: too few were seen."""
        return self._law

    def solved(self) -> StepTime | None:
        """As of now, however few were seen; None: none was."""
        return self._solution() if self._steps else None

    def _solution(self) -> StepTime:
        best, least = (0.0, 0.0, 0.0), 0.0  # the error, less a constant, of all coefficients 0
        for size in (1, 2, 3):
            for used in combinations(range(3), size):
                found = self._solve(used)
                if found is not None and min(found) >= 0 and (error := self._error(found)) < least:
                    best, least = found, error
        return StepTime(*best)

    def _error(self, x: Features) -> float:
        quadratic = sum(x[i] * x[j] * self._products[i][j] for i in range(3) for j in range(3))
        return quadratic - 2 * sum(x[i] * self._targets[i] for i in range(3))

    def _solve(self, used: Sequence[int]) -> Features | None:
        """The normal equations in these coefficients, each scaled to a diagonal of 1; None: singular."""
        scale = [self._products[i][i] ** -0.5 if self._products[i][i] > 0 else 0.0 for i in used]
        rows = [
            [self._products[i][j] * scale[m] * scale[n] for n, j in enumerate(used)] + [self._targets[i] * scale[m]]
            for m, i in enumerate(used)
        ]
        for pivot in range(len(used)):
            rows[pivot][pivot] += _RIDGE
            if rows[pivot][pivot] <= _RIDGE * 10:
                return None
            for row in range(len(used)):
                if row != pivot:
                    factor = rows[row][pivot] / rows[pivot][pivot]
                    rows[row] = [x - factor * y for x, y in zip(rows[row], rows[pivot], strict=True)]
        x = [0.0, 0.0, 0.0]
        for place, i in enumerate(used):
            x[i] = rows[place][-1] / rows[place][place] * scale[place]
        return x[0], x[1], x[2]
