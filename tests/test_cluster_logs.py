"""Logs as JSON: one object a line, with the request's id where a message names one."""

from __future__ import annotations

import json
import logging

import pytest
from baton.cluster.progress import StartProgress, json_line


def test_a_record_names_its_process_level_and_request() -> None:
    request_id = f"req-{'0a' * 16}"
    fields = {"level": logging.INFO, "logger": "baton.router.core", "message": f'{request_id} said "é"\n'}
    line = json_line("router", fields, 1.5)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": 1.5,
        "process": "router",
        "level": "info",
        "logger": "baton.router.core",
        "message": f'{request_id} said "é"\n',
        "request_id": request_id,
    }
    assert "request_id" not in json.loads(json_line("router", {**fields, "message": "req-1"}, 0.0))


def test_everything_is_printed_as_json_and_only_warnings_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"level": logging.INFO, "logger": "baton", "message": "hello"}
    StartProgress(verbose=False).report("decode-0", "log", fields)
    assert capsys.readouterr().err == ""
    StartProgress(verbose=False, as_json=True).report("decode-0", "log", fields)
    assert json.loads(capsys.readouterr().err)["process"] == "decode-0"
