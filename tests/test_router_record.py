"""What a request's report says of the moments between its two workers."""

from __future__ import annotations

from baton.proto import worker_pb2 as pb
from baton.proto.clock import clock_name
from baton.router.record import Record


def _record(prefill: str, decode: str, *, commit_first: bool = False) -> Record:
    record = Record(100.0, 8, 1)
    first = pb.FirstTokens(leg=pb.LegRef(attempt=1), drawn_at=5.0)
    committed = pb.Committed(leg=pb.LegRef(attempt=1), at=5.25, bytes=10, frames=2)
    if commit_first:
        record.committed(committed, 103.0, decode)
    record.prefilled(first, 101.0, prefill)
    if not commit_first:
        record.committed(committed, 103.0, decode)
    record.stepped(1, [pb.Token(index=0)], 5.25, 103.0, decode)  # the repetition of token 1
    record.stepped(1, [pb.Token(index=1)], 5.5, 104.0, decode)
    record.stepped(1, [pb.Token(index=2)], 5.75, 105.0, decode)
    return record


def test_workers_that_share_a_clock_are_measured_by_it() -> None:
    for commit_first in (False, True):  # the sessions of two workers are in no order
        timing = _record("host", "host", commit_first=commit_first).timing(106.0, 1, 0)
        assert (timing.commit_s, timing.worker_gap_s, timing.kv_bytes) == (0.25, 0.5, 10)


def test_moments_of_different_or_unknown_clocks_are_those_of_the_router() -> None:
    for clocks in (("host", "other"), ("", ""), ("host", "")):
        timing = _record(*clocks).timing(106.0, 1, 0)
        assert (timing.commit_s, timing.worker_gap_s) == (2.0, 3.0)


def test_another_attempts_prefill_is_not_taken_for_this_ones() -> None:
    record = _record("host", "host")
    record.committed(pb.Committed(leg=pb.LegRef(attempt=2), at=9.0), 109.0, "host")  # moved: nothing was prefilled
    assert record.timing(110.0, 2, 0).commit_s == 0.25


def test_a_clock_has_a_name_that_stays() -> None:
    assert clock_name() == clock_name() != ""
