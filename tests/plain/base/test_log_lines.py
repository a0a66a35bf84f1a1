"""base/log.py: what a client sent cannot make up a log line, or paint a terminal."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.base.log import PlainLines, logger

FORGED = "name\nERROR 01-01 00:00:00 [quire] all is lost\r\x1b[31m\x00\x9b\u2028\u202e"


def line(message: str, *args: Any, exc_info: Any = None) -> str:
    record = logging.LogRecord("quire.x", logging.INFO, "", 1, message, args, exc_info)
    return PlainLines("%(levelname)s %(message)s").format(record)


@pytest.mark.parametrize("given", [FORGED, ValueError(FORGED)], ids=["text", "error"])
def test_one_line_stays_one_line(given: object) -> None:
    found = line("Requests have %s", given)
    assert found.isprintable() and found.startswith("INFO Requests have name\\nERROR")
    assert "\\r\\x1b[31m\\x00\\x9b\\u2028\\u202e" in found


def test_lines_of_our_own_stay() -> None:
    assert line("The engine died:\n%s", "one\n  two\x1b[0m") == "INFO The engine died:\none\n  two\\x1b[0m"
    assert line("plain – ünïcode\t日本") == "INFO plain – ünïcode\t日本"


def test_a_stack_has_lines_and_no_colours() -> None:
    try:
        raise ValueError("red \x1b[31m")
    except ValueError as wrong:
        found = line("It failed", exc_info=(type(wrong), wrong, wrong.__traceback__))
    assert "Traceback" in found and "red \\x1b[31m" in found and "\x1b" not in found


def test_quires_own_handler_does_it() -> None:
    logger("quire.x")
    assert all(isinstance(one.formatter, PlainLines) for one in logging.getLogger("quire").handlers[:1])
