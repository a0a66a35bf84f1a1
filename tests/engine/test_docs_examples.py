"""Every Python example of the README and the docs runs as it stands, on the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", ROOT / "docs/guide.md"]


def examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        found += [(f"{page.stem}-{number}", block) for number, block in enumerate(blocks)]
    return found


EXAMPLES = examples()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("name, code", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example(name: str, code: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stderr
    if "print(" in code:
        assert len(done.stdout) > 5
