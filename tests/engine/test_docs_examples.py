"""Every Python example of the README and the docs runs as it stands, on the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fenced import programs

EXAMPLES = [(block.name, block.code) for block in programs()]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize("name, code", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example(name: str, code: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stderr
    if "print(" in code:
        assert len(done.stdout) > 5
