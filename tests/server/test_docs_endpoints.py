"""Commands and programs of docs/server work as they are written, and endpoints.md names every route."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.base import env
from tests.fenced import SERVER, Block, asking
from tests.server.live import Live, live

PAGES = Path(__file__).parents[2] / "docs" / "server"
PAGE = (PAGES / "endpoints.md").read_text()
ASKING = asking()
LINES = [block for block in ASKING if block.language == "sh"]
PROGRAMS = [block for block in ASKING if block.language == "python"]


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
@pytest.mark.parametrize("block", LINES, ids=[block.name for block in LINES])
def test_the_line_works(documented: Live, block: Block) -> None:
    line = block.code
    command = line.replace(SERVER, documented.url).replace("curl ", "curl -sS --fail-with-body --max-time 60 ")
    command = f"set -e\n{command}"
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    finally:
        if "/pause" in line:  # the page goes on with /resume; here other lines may come first
            httpx.post(documented.url + "/resume", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in line and block.page.endswith("endpoints.md"):
        assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.name for block in PROGRAMS])
def test_the_program_runs(documented: Live, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.code.replace(SERVER, documented.url), block.page, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_page_names_every_route(documented: Live) -> None:
    paths = httpx.get(documented.url + "/openapi.json", timeout=60).json()["paths"]
    missing = [path for path in paths if path.replace("{model}", "smol") not in PAGE]
    assert not missing
