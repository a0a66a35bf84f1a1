"""Logging configurations written for vLLM or for the root logger, and lines of JSON; each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.logs import for_quire, logs_at_root

SAY = """
import logging, sys, json
from quire.base.log import logger
from quire.config.extras import LoggingConfig
from quire.config.logs import apply_logging
log = logger("quire.early")
apply_logging(LoggingConfig(**json.loads(sys.argv[1])))
logger("quire.late").info("hello %s", "to\\nyou")
logger("quire.sched.deep").debug("deep")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
"""


def said(tmp_path: Path, by_variable: str = "", **options: Any) -> tuple[str, str]:
    """(what the file of the configuration has, standard error)."""
    variables = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    if by_variable:
        path = tmp_path / "logging.json"
        path.write_text(json.dumps(options.pop("logging_config")))
        variables[by_variable] = str(path)
    command = [sys.executable, "-c", SAY, json.dumps(options)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "log.txt"
    return file.read_text() if file.exists() else "", done.stderr + done.stdout


def configuration(tmp_path: Path, **further: Any) -> dict[str, Any]:
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log.txt"), "formatter": "mine"}
    return {
        "version": 1, "formatters": {"mine": {"format": "MINE %(name)s %(message)s"}}, "handlers": {"file": handler},
        **further,
    }  # fmt: skip


@pytest.mark.parametrize("variable", ["", "VLLM_LOGGING_CONFIG_PATH", "QUIRE_LOGGING_CONFIG_PATH"])
def test_a_configuration_of_vllm_goes_for_quire(variable: str, tmp_path: Path) -> None:
    loggers = {
        "vllm": {"handlers": ["file"], "level": "INFO", "propagate": False},
        "vllm.sched": {"level": "DEBUG"},
    }
    written, shown = said(tmp_path, variable, logging_config=configuration(tmp_path, loggers=loggers))
    assert "MINE quire.late hello to" in written and "MINE quire.sched.deep deep" in written
    assert "hello" not in shown, "not twice"


@pytest.mark.parametrize("where", ["root", "loggers"])
def test_a_configuration_of_the_root_gets_the_records(where: str, tmp_path: Path) -> None:
    root = {"handlers": ["file"], "level": "INFO"}
    further = {"root": root} if where == "root" else {"loggers": {"": root}}
    written, shown = said(tmp_path, logging_config=configuration(tmp_path, **further))
    assert written.count("MINE quire.late hello to") == 1 and "ZeroDivisionError" in written
    assert "hello" not in shown, "a logger made later does not bring our handler back"


def test_what_is_said_of_quire_itself_holds() -> None:
    both = {
        "loggers": {"vllm": {"level": "INFO"}, "quire": {"level": "ERROR"}, "vllmore": {}},
        "root": {"handlers": ["x"]},
    }
    assert for_quire(both)["loggers"]["quire"] == {"level": "ERROR"} and "quireore" not in for_quire(both)["loggers"]
    assert not logs_at_root(both) and logs_at_root({"root": {"handlers": ["x"]}}) and not logs_at_root({"root": {}})


def test_lines_of_json(tmp_path: Path) -> None:
    _, shown = said(tmp_path, log_format="json")
    lines = [json.loads(line) for line in shown.splitlines()]
    assert [line["message"] for line in lines] == ["hello to\nyou", "it failed"]
    assert lines[0]["logger"] == "quire.late" and lines[0]["level"] == "INFO" and isinstance(lines[0]["process"], int)
    assert lines[0]["time"].endswith("Z") and "ZeroDivisionError" in lines[1]["exception"]
