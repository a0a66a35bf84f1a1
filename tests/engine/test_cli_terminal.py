"""`quire chat` and `quire complete` as a user runs them, on the embedded model, through pipes and a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pseudo_terminal import Terminal

QUIRE = str(Path(sys.executable).parent / "quire")
SMALL = ["--max-model-len", "512", "--temperature", "0"]


def run(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([QUIRE, *arguments], input=typed, capture_output=True, text=True, timeout=240)


def test_complete_continues_a_text() -> None:
    done = run("complete", "-q", "1, 2, 3, 4, 5,", "--max-tokens", "12", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" 6, 7, 8,")
    assert re.fullmatch(r"loading the embedded model \.\.\. \d+\.\d s\n", done.stderr)


def test_chat_reads_a_pipe_and_prints_only_answers() -> None:
    done = run("chat", *SMALL, "--max-tokens", "8", "--stop", "\n", typed="My name is Ada.\n\nWhat is my name?\n")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 2 and all(len(answer.split()) > 3 for answer in answers)
    assert "you>" not in done.stdout


def test_a_missing_model_is_one_clear_line() -> None:
    done = run("complete", "-q", "x", "no/such-model-anywhere")
    assert done.returncode == 1
    assert not done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("quire complete: ") and "no/such-model-anywhere" in last
    assert "Traceback" not in done.stderr


def test_a_bad_option_is_one_clear_line() -> None:
    done = run("complete", "-q", "x", "--max-tokens", "-3")
    assert done.returncode == 1
    assert done.stderr == "quire complete: max_tokens must be at least 1, got -3\n"  # before anything is loaded


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal(QUIRE, "chat", *SMALL, "--max-tokens", "400")
    yield opened
    os.close(opened.fd)


def test_control_c_stops_the_answer_and_control_d_ends(terminal: Terminal) -> None:
    terminal.wait_for("you> ")
    terminal.type("Count from one to one hundred in words, slowly.\n")
    terminal.wait_for("\n")  # the echo
    terminal.wait_for("o")  # the answer has begun
    os.kill(terminal.pid, signal.SIGINT)
    terminal.wait_for("you> ", seconds=30)
    terminal.type("Say hello.\n")
    terminal.wait_for("\n")
    assert re.search("[a-z]{2}", terminal.wait_for("you> "))
    terminal.type("\x04")
    assert terminal.status() == 0
