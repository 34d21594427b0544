"""A prefill or decode process is killed, frozen, or cut off in one direction, at each stage of a request.

The client gets its complete right answer from another pair, or one clear error within the deadline; other streams get
their own tokens; nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from baton.tests.harness.fault_rig import ROLES, STAGES, Case, Fault, FaultRig, fault_rig
from baton.tests.harness.reader import Outcome

FAULTS: tuple[Fault, ...] = ("kill", "stop", "half-open", "mute", "deaf")
FULL = [Case(*case) for case in product(FAULTS, ROLES, STAGES)]
SOME = [
    Case("half-open", "prefill", "mid frame"),
    Case("stop", "decode", "reserved"),
    Case("kill", "decode", "before commit"),
    Case("mute", "decode", "after commit"),
]
pytestmark = pytest.mark.timeout(300)  # its waits have limits of their own


def name(case: Case) -> str:
    """For people."""
    return " ".join(case).replace(" ", "-")


@pytest.fixture(scope="module", params=["inline"])
def cluster(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultRig]:
    with fault_rig(tmp_path_factory.mktemp("matrix"), tiny_dir, request.param) as started:
        yield started


def served(outcome: Outcome) -> None:
    """With a healthy pair left, the answer is whole."""
    assert outcome.answer is not None, outcome.code


@pytest.mark.parametrize("case", SOME, ids=name)
def test_a_fault_in_a_request_costs_nobody_a_token(cluster: FaultRig, case: Case) -> None:
    served(cluster.run(case))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["inline", "gloo", "shm"], indirect=True)
@pytest.mark.parametrize("case", FULL, ids=name)
def test_any_fault_at_any_stage_costs_nobody_a_token(cluster: FaultRig, case: Case) -> None:
    served(cluster.run(case))
