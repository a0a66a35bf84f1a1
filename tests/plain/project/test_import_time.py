"""`import quire` and `quire --help` stay light: no heavy module, and a few hundredths of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "fastapi", "tokenizers", "numpy", "jinja2", "zmq", "huggingface_hub")
QUIRE = str(Path(sys.executable).parent / "quire")


def heavy_after(code: str) -> list[str]:
    ask = f"{code}\nimport sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()[-1].split()


def fastest(command: list[str], repeats: int = 5) -> float:
    """The least processor time of several runs: what the command needs when nothing else is in its way."""
    times = []
    for _ in range(repeats):
        before = os.times()
        subprocess.run(command, capture_output=True, check=True, timeout=300)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_import_quire_loads_nothing_heavy() -> None:
    assert heavy_after("import quire") == []


@pytest.mark.parametrize("code", ["import quire.cli.main as m; m.main(['--help'])", "import quire.cli.main"])
def test_the_command_loads_nothing_heavy(code: str) -> None:
    assert heavy_after(code) == []


def test_parameters_and_arguments_need_no_torch() -> None:
    found = heavy_after("from quire import SamplingParams, EngineArgs; SamplingParams(); EngineArgs()")
    assert not {"torch", "transformers", "fastapi"} & set(found)


def test_the_front_doors_need_no_torch_before_an_engine_is_made() -> None:
    assert not {"torch", "transformers", "fastapi"} & set(heavy_after("from quire import LLM, AsyncLLM, LLMEngine"))


def test_import_quire_is_fast() -> None:
    floor = fastest([sys.executable, "-c", "pass"])
    assert fastest([sys.executable, "-c", "import quire"]) - floor < 0.2


def test_help_is_fast() -> None:
    floor = fastest([sys.executable, "-c", "pass"])
    assert fastest([QUIRE, "--help"]) - floor < 0.5
