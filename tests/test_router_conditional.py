"""When a prompt is better computed where it will be decoded."""

from __future__ import annotations

import math

from baton.proto.step_time import StepTime
from baton.router.life_messages import Peer
from baton.router.outstanding import Work
from baton.router.placement.conditional import local_ttft_s, prefill_on_decode
from baton.router.placement.policy import Candidate, Demand
from hypothesis import given
from hypothesis import strategies as st

PREFILL, DECODE = StepTime(0.02, 1e-4, 1e-9), StepTime(0.02, 1e-4, 1e-8)
TPOT = 0.05


def leg(tokens: int) -> Demand:
    return Demand(tokens, 100, 1, "")


def prefiller(*queued: int, cached: int = 0) -> Candidate:
    works = [Work(tokens, tokens**2, 1) for tokens in queued]
    return Candidate(Peer("p", "1"), sum(queued), works, cached, PREFILL, step_tokens=2048)


def decoder(sequences: int, cached: int = 0) -> Candidate:
    works = [Work(1000, 0, 1)] * sequences
    return Candidate(Peer("d", "1"), 1000 * sequences, works, cached, DECODE)


def here(demand: Demand, prefill: Candidate, decode: Candidate, transfer_s: float = 0.0) -> bool:
    return prefill_on_decode(demand, prefill, decode, PREFILL, TPOT, transfer_s)


def test_a_long_prompt_goes_to_an_idle_prefill_worker() -> None:
    assert not here(leg(8000), prefiller(), decoder(8))


def test_a_short_rest_is_computed_where_its_prefix_is() -> None:
    assert here(leg(8000), prefiller(), decoder(8, cached=7900))
    assert not here(leg(8000), prefiller(cached=7990), decoder(8))


def test_a_busy_prefill_worker_or_a_slow_transfer_turns_the_scale() -> None:
    assert not here(leg(1000), prefiller(), decoder(8))
    assert here(leg(1000), prefiller(*[1000] * 8), decoder(8))
    assert here(leg(1000), prefiller(), decoder(8), transfer_s=1.0)


def test_a_batch_that_fills_its_step_takes_no_prompt() -> None:
    crowded = decoder(300)
    assert local_ttft_s(leg(100), crowded, PREFILL, TPOT) == math.inf
    assert not here(leg(100), prefiller(*[5000] * 20), crowded)


def test_workers_without_laws_keep_apart() -> None:
    nobody = Candidate(Peer("p", "1"), 0)
    assert not here(leg(10), nobody, decoder(0))
    assert not here(leg(10), prefiller(), nobody)


@given(st.integers(1, 9000), st.integers(0, 60), st.integers(0, 20), st.floats(0, 1))
def test_less_to_compute_here_or_more_to_wait_for_there_never_speaks_against_it(
    tokens: int, sequences: int, queued: int, part: float
) -> None:
    cached = int(part * (tokens - 1))
    if here(leg(tokens), prefiller(*[1000] * queued), decoder(sequences)):
        assert here(leg(tokens), prefiller(*[1000] * queued), decoder(sequences, cached=cached))
        assert here(leg(tokens), prefiller(*[1000] * (queued + 1)), decoder(sequences))
