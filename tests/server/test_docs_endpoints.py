"""Commands and programs of docs/server work as they are written, and endpoints.md names every route."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.base import env
from tests.server.live import Live, live

PAGES = Path(__file__).parents[2] / "docs" / "server"
PAGE = (PAGES / "endpoints.md").read_text()
LINES = re.findall(r"```sh\n(curl .*?)\n```", PAGE, re.DOTALL)
STORED = re.findall(r"```sh\n(curl .*?)\n```", (PAGES / "responses.md").read_text(), re.DOTALL)
ELSEWHERE = "http://localhost:8000"


@pytest.fixture(scope="module")
def documented() -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_SERVER_DEV_MODE", "1")
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        env.forget_all()
        engine = {"served_model_name": "smol", "max_model_len": 512, "disable_log_stats": False, "max_num_seqs": 16}
        with live(engine=engine, enable_tokenizer_info_endpoint=True) as server:
            yield server
    env.forget_all()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", [*LINES, *STORED], ids=range(len(LINES) + len(STORED)))
def test_the_line_works(documented: Live, line: str) -> None:
    assert ELSEWHERE in line
    command = line.replace(ELSEWHERE, documented.url).replace("curl ", "curl -sS --fail-with-body --max-time 60 ")
    command = f"set -e\n{command}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in line and line in LINES:
        assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("page", ["responses.md", "anthropic.md"])
def test_the_program_runs(documented: Live, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)\n```", (PAGES / page).read_text(), re.DOTALL)
    assert ELSEWHERE in program
    exec(compile(program.replace(ELSEWHERE, documented.url), page, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_page_names_every_route(documented: Live) -> None:
    paths = httpx.get(documented.url + "/openapi.json").json()["paths"]
    missing = [path for path in paths if path.replace("{model}", "smol") not in PAGE]
    assert not missing
