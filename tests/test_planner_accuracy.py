"""The planner's laws against what others measured: fitted to half of the settings, tested on the other half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from baton.cluster.planner import published
from baton.cluster.planner.fitting import errors, non_negative
from baton.cluster.planner.published import Row
from baton.proto.errors import ConfigError

DATA = Path(__file__).resolve().parent / "data" / "published_measurements.csv"


def rows(kind: str) -> list[Row]:
    return [row for row in published.read(DATA)[0] if row.kind == kind]


def mean_error(tested: Sequence[Row], predicted: Sequence[float]) -> float:
    return float(errors(predicted, [row.value for row in tested]).mean())


def by_halves(of: Sequence[Row]) -> dict[str, float]:
    """GPU -> mean error of the halves that were not fitted to."""
    found: dict[str, list[float]] = {}
    for taught, tested in published.split(of):
        assert not set(map(id, taught)) & set(map(id, tested))
        predicted = published.predict_all(taught, tested)
        found.setdefault(tested[0].gpu, []).extend(errors(predicted, [row.value for row in tested]))
    return {gpu: float(np.mean(values)) for gpu, values in found.items()}


def test_tpot_within_an_engine_and_far_better_than_bandwidth_alone() -> None:
    found = by_halves(rows("tpot"))
    assert set(found) == {"h100-sxm", "h200-sxm"}
    assert max(found.values()) < 0.06
    assert mean_error(rows("tpot"), [row.roofline() for row in rows("tpot")]) > 0.5


def test_tpot_of_a_model_that_was_left_out() -> None:
    cases = list(published.left_out(rows("tpot")))
    assert len(cases) == 2
    for _, taught, tested in cases:
        assert mean_error(tested, published.predict_all(taught, tested)) < 0.10


def test_prefill_over_all_degrees_of_parallelism() -> None:
    found = by_halves(rows("prefill"))
    assert set(found) == {"a100-sxm-80", "h100-sxm"}
    assert max(found.values()) < 0.12


def test_kv_blocks() -> None:
    assert max(by_halves(rows("kv")).values()) < 0.03


def test_rows_that_the_laws_do_not_cover_are_counted(tmp_path: Path) -> None:
    lines = DATA.read_text().splitlines()
    first = next(line for line in lines if "prompt_time" in line)
    (tmp_path / "t.csv").write_text("\n".join([lines[0], first.replace("prompt_time", "mood"), first]))
    kept, left = published.read(tmp_path / "t.csv")
    assert left["metric mood"] == 1
    assert len(kept) + sum(left.values()) == 2
    (tmp_path / "u.csv").write_text("source,model\n")
    with pytest.raises(ConfigError, match="lacks the columns dtype, gpu"):
        published.read(tmp_path / "u.csv")


def test_fits_are_exact_where_they_can_be_and_never_below_their_bounds() -> None:
    features = np.array([[1.0, n, n * n] for n in (1, 2, 5, 9)])
    law = np.array([0.5, 0.0, 0.25])
    assert non_negative(features, features @ law) == pytest.approx(law)
    assert non_negative(features, features @ law, [1.0, 0, 0])[0] >= 1.0
    falling = non_negative(np.array([[1.0, 1], [1, 2], [1, 3]]), np.array([3.0, 2, 1]))
    assert min(falling) >= 0
    with pytest.raises(ValueError, match="more than 0"):
        non_negative(features, np.zeros(4))
