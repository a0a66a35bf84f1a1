"""Every Python example of the README and the docs runs as it stands, on the embedded model: those of the README each in
an interpreter of its own, the others in forks of one that has torch imported (tests/warm_python.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fenced import programs
from tests.warm_python import WarmPython

EXAMPLES = [(block.name, block.code) for block in programs()]
FRESH = "README-"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize("name, code", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example(name: str, code: str, tmp_path: Path, warm_python: WarmPython) -> None:
    program = tmp_path / "example.py"
    program.write_text(code)
    if name.startswith(FRESH):
        command = [sys.executable, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    else:
        done = warm_python.run(program, env=os.environ, timeout=240)
    assert done.returncode == 0, done.stderr
    if "print(" in code:
        assert len(done.stdout) > 5
