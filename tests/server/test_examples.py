"""Every program of examples/ runs as it stands, on the embedded model; clients ask a server with the flags named.
`stream_client`, `offline` and `batch_file` each run in an interpreter of their own, the others in forks of one that has
torch imported, and for clients openai (tests/warm_python.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import Live, live
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
CLIENTS = {path.stem for path in PROGRAMS if "from openai import" in path.read_text()}
FRESH = {"stream_client", "batch_file", "offline"}  # batch_file needs no torch itself: it starts a command
SHOWN = {
    "agent": r"(?s)(add|count_letters)\(\{.*\}\) -> .*\nanswer after \d turns: .+",
    "batch_file": r"(?s)river: ['\"].+\ncolour: ['\"].+\nanimal: ['\"].+",
    "chat": r"(?s)> Name a river in Europe\.\n.+> Which sea.+\([1-9]\d* of \d+ prompt tokens came from the prefix",
    "logits_processor": r"(?s)The capital of France is Paris.*without the token ' Paris'",
    "logprobs": r"(?s)' Paris' ' Paris' \d+%.*perplexity \d+\.\d.*perplexity",
    "offline": r"(?s)'The capital of France is' -> ' Paris.*Once upon a time.*fibonacci",
    "own_model": r"\[(\d+, ){7}\d+\]",
    "stream_client": r"(?s).{40,}\n\d+ tokens, the first after \d+\.\d\d s",
    "structured": r"(?s)a city: \{.*\}\na mood: (cheerful|sad|angry)\na date: (19|20)\d\d-\d\d-\d\d\n",
    "tools": r"(?s)weather\(\{.*\}\) -> \{'city': .+'degrees': (21|70).*\}\n.+",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    """As the examples' opening lines say: --enable-auto-tool-choice --tool-call-parser hermes."""
    with live(engine={"max_model_len": 2048}, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


def test_there_are_ten() -> None:
    assert {path.stem for path in PROGRAMS} == set(SHOWN) and len(SHOWN) == 10


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_says_how_it_is_run(path: Path) -> None:
    opening = path.read_text().split('"""')[1]
    assert re.search(rf"^ *python examples/{path.name}", opening, re.MULTILINE)
    if path.stem in CLIENTS:
        assert re.search(r"^ *quire serve", opening, re.MULTILINE)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_runs(path: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    arguments: list[str] = []
    if path.stem in CLIENTS:
        server: Live = request.getfixturevalue("served")
        arguments += ["--url", f"{server.url}/v1"]
    if path.stem in FRESH:
        command = [sys.executable, str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, cwd=tmp_path)
    else:
        warm: WarmPython = request.getfixturevalue("warm_python")
        more = ("openai",) if path.stem in CLIENTS else ()
        done = warm.run(path, *arguments, env=os.environ, cwd=tmp_path, timeout=300, more=more)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(SHOWN[path.stem], done.stdout), done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
    if path.stem == "structured":
        city = json.loads(re.search(r"a city: (.*)", done.stdout).group(1))
        assert set(city) == {"city", "country", "inhabitants"} and isinstance(city["inhabitants"], int)
