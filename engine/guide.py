"""Which tokens the grammars of a step's requests allow: one mask for each row of logits that a grammar concerns.

A state belongs to a sequence and is nothing but its grammar and the ids that it has said, so it can be made anew
anywhere: on the decode worker behind token 1, after a preemption, on the worker that a sequence moved to. It is brought
up to date by going back to the longest common beginning and on from there. A step's proposals are followed row by row
in the same way (verify.py).

Masks depend on what was said before the step, not on the step's logits: a thread computes them while the model runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import numpy as np
import torch
from torch import Tensor

from ..proto.errors import BatonError, InternalError, InvalidRequest
from ..text.grammar import Vocabulary
from .proposer import SequenceName
from .speculation import name_of
from .step import Draw, SequenceStep
from .verify import draws_of

_log = logging.getLogger(__name__)
_COMPILED = 64  # grammars that are kept compiled
_IDLE_STEPS = 64  # after so many steps without its sequence a state is forgotten

Row = Tensor | BatonError  # bool [tokens of the tokenizer], or why there is none
Rows = dict[int, Row]  # row of logits -> what may be drawn from it


@dataclass(slots=True)
class _State:
    grammar: str
    matcher: llguidance.LLMatcher
    said: list[int] = field(default_factory=list)  # what the matcher has taken in
    used: int = 0  # number of the step


class Guide:
    """The grammar states of one engine. Its methods are called from the engine's thread."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """load: called once, when the first grammar comes; blocks."""
        self._load = load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guide")
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._states: dict[SequenceName, _State] = {}
        self._step = 0

    def expect(self, grammar: str) -> None:
        """A request with this grammar will come: it is compiled meanwhile."""
        if grammar:
            self._thread.submit(self._compile_quietly, grammar)

    def begin(self, steps: Sequence[SequenceStep]) -> Future[Rows] | None:
        """The masks for a step's rows of logits, being computed; None where no grammar is concerned."""
        if not any(step.draw is not None and step.draw.params.grammar for step in steps):
            return None
        return self._thread.submit(self._rows, list(steps))

    def allowed(self, step: SequenceStep, proposals: Sequence[int]) -> Sequence[int]:
        """Of tokens that are proposed to follow a step, those before the first that the grammar forbids."""
        if step.draw is None or not step.draw.params.grammar:
            return proposals
        return self._thread.submit(self._cut, step, step.draw, list(proposals)).result()

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _rows(self, steps: Sequence[SequenceStep]) -> Rows:
        self._step += 1
        rows: Rows = {}
        number = 0
        for step in steps:
            draws = draws_of(step)
            for offset, draw in enumerate(draws):
                if draw.params.grammar:
                    rows[number + offset] = self._row(step, draw)
            number += len(draws)
        kept = {name: state for name, state in self._states.items() if self._step - state.used < _IDLE_STEPS}
        self._states = kept
        return rows

    def _row(self, step: SequenceStep, draw: Draw) -> Row:
        try:
            state = self._follow(step, draw)
            mask = np.zeros(self._known().mask_words, dtype=np.int32)
            state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if state.matcher.is_error():
                return self._failed(step, state.matcher.get_error())
            return torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little")).bool()
        except BatonError as error:
            return error
        except Exception as error:  # of the library, or of reading the tokenizer: this request's, not the engine's
            _log.exception("a grammar failed")
            return InternalError(f"the grammar cannot be followed: {error}")

    def _failed(self, step: SequenceStep, reason: str) -> BatonError:
        del self._states[name_of(step)]
        return InvalidRequest(f"the grammar cannot be followed: {reason.strip():.300}", field="response_format")

    def _cut(self, step: SequenceStep, draw: Draw, proposals: list[int]) -> Sequence[int]:
        try:
            return proposals[: self._follow(step, draw).matcher.validate_tokens(proposals)]
        except BatonError:
            return ()  # the row of the step itself will say so

    def _follow(self, step: SequenceStep, draw: Draw) -> _State:
        """The state after all that the draw knows as said. Raises InvalidRequest."""
        name, said = name_of(step), list(draw.generated)
        state = self._states.get(name)
        common = 0 if state is None else _common(state.said, said)
        if state is not None and len(state.said) > common and not state.matcher.rollback(len(state.said) - common):
            state = None
        if state is None or state.grammar != draw.params.grammar:
            grammar, common = draw.params.grammar, 0
            state = self._states[name] = _State(grammar, self._compile(grammar).deep_copy())
        state.used = self._step
        if not state.matcher.consume_tokens(said[common:]) or state.matcher.is_error():
            raise self._failed(step, state.matcher.get_error() or "the answer so far does not follow it")
        state.said = said
        return state

    def _compile_quietly(self, grammar: str) -> None:
        try:
            self._compile(grammar)
        except Exception:
            _log.exception("a grammar could not be compiled")

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        known = self._compiled.get(grammar)
        if known is None:
            known = self._compiled[grammar] = self._known().matcher(grammar)
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known

    def _known(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How long the common beginning is; nearly always all of `one`."""
    if len(one) <= len(other) and list(other[: len(one)]) == list(one):
        return len(one)
    return next(i for i, (a, b) in enumerate(zip([*one, -1], [*other, -2], strict=False)) if a != b)
