"""docs/testing.md names a test for each case of the field reports, and the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CASES = [f"LC-{number:02}" for number in range(1, 15)] + [f"KV-{number:02}" for number in range(1, 17)]
CASES += [f"ST-{number:02}" for number in range(1, 11)] + [f"OB-{number:02}" for number in range(1, 6)]
CASES += [f"SP-{number:02}" for number in range(1, 8)] + [f"API-{number:02}" for number in range(1, 11)]
CASES += [f"PB-{number:02}" for number in range(1, 10)]


def _table() -> dict[str, list[str]]:
    text = (TESTS.parent / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| ((?:LC|KV|SP|ST|API|OB|PB)-\d\d) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {case: re.findall(r"`(\w+::\w+)`", tests) for case, tests in rows}


def test_the_table_has_every_case() -> None:
    assert list(_table()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_exist(case: str) -> None:
    tests = _table()[case]
    assert tests
    for test in tests:
        module, name = test.split("::")
        functions = ast.parse((TESTS / f"{module}.py").read_text()).body
        assert name in {f.name for f in functions if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}, test
