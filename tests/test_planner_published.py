"""What others found of disaggregation, at their settings: the direction and about the size; and where it loses."""

from __future__ import annotations

import pytest
from baton.benchmarks.published_gains import SETTINGS, Setting, measure


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_gain_is_about_what_was_published(setting: Setting) -> None:
    row = measure(setting)
    assert row.as_expected, row
    assert row.verdict == ("disaggregate" if setting.within[0] >= 1 else "do not disaggregate")
