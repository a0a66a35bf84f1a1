"""The pages at / and /docs over HTTP: what is served, to whom, under which headers; what the engine view is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.server.console import pages
from tests.server.hosted import hosted
from tests.server.live import Live, live_fake

STATIC = Path(pages.__file__).parent / "static"
KEY = {"Authorization": "Bearer open-sesame"}
OUTSIDE = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+""")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("plain"), engine={"disable_log_stats": False}) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("locked"), api_key=("open-sesame",)) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = {"disable_console": True, "disable_fastapi_docs": True}
    with live_fake(tmp_path_factory.mktemp("bare"), **options) as server:
        yield server


def files_of(page: str) -> list[str]:
    return re.findall(r'(?:src|href)="(console/[^"]+)"', page)


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc"])
def test_a_page_and_its_files_are_served_under_a_strict_policy(plain: Live, path: str) -> None:
    page = httpx.get(plain.url + path, timeout=60)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    named = files_of(page.text)
    assert any(name.endswith(".js") for name in named) and any(name.endswith(".css") for name in named)
    for answer in (page, *(httpx.get(f"{plain.url}/{name}", timeout=60) for name in named)):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_pages_have_no_script_of_their_own_and_name_no_other_site() -> None:
    for page in STATIC.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", text), page.name
    for file in STATIC.iterdir():
        named = {found for found in OUTSIDE.findall(file.read_text()) if not found.endswith("//www.w3.org")}
        assert not named, (file.name, named)


def test_a_file_that_has_not_changed_is_not_sent_again(plain: Live) -> None:
    first = httpx.get(f"{plain.url}/console/files/app.js", timeout=60)
    again = httpx.get(f"{plain.url}/console/files/app.js", headers={"If-None-Match": first.headers["etag"]}, timeout=60)
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["nothing.js", "index.html", "..%2fpages.py", "../pages.py", "%2e%2e/pages.py", "", "style.css/"]
)
def test_only_the_files_are_served(plain: Live, name: str) -> None:
    assert httpx.get(f"{plain.url}/console/files/{name}", timeout=60).status_code == 404


def test_a_key_guards_what_is_told_and_not_the_page(locked: Live) -> None:
    for path in ("/", "/docs", *(f"/{name}" for name in files_of(httpx.get(locked.url + "/", timeout=60).text))):
        assert httpx.get(locked.url + path, timeout=60).status_code == 200
    for path in ("/console/stats", "/openapi.json", "/v1/models", "/console/files/nothing.js"):
        assert httpx.get(locked.url + path, timeout=60).status_code == 401, path
    assert httpx.get(f"{locked.url}/console/stats", headers=KEY, timeout=60).status_code == 200


def test_it_can_be_switched_off(bare: Live) -> None:
    for path in ("/", "/docs", "/redoc", "/openapi.json", "/console/stats", "/console/files/app.js"):
        assert httpx.get(bare.url + path, timeout=60).status_code == 404, path
    assert httpx.get(f"{bare.url}/v1/models", timeout=60).status_code == 200


def test_stats_tell_counts_and_the_last_requests(plain: Live) -> None:
    before = httpx.get(f"{plain.url}/console/stats", timeout=60).json()
    body = {"prompt": "abcabc", "max_tokens": 7, "temperature": 0}
    assert plain.post("/v1/completions", body, headers={"X-Request-Id": "whose-it-was"}).status_code == 200
    told = httpx.get(f"{plain.url}/console/stats", timeout=60)
    stats = told.json()
    assert stats["generated_tokens"] - before["generated_tokens"] == 7
    assert stats["prompt_tokens"] - before["prompt_tokens"] == 6
    assert stats["measured"] and stats["model"] == "fake" and stats["max_model_len"] == 512 and stats["kv_tokens"] > 0
    last = stats["ended"][0]
    assert (last["prompt_tokens"], last["generated_tokens"], last["finish_reason"]) == (6, 7, "length")
    assert last["queue"] >= 0 and last["prefill"] > 0 and last["decode"] > 0
    assert last["total"] >= last["prefill"] + last["decode"] and 0 <= last["ago"] < 60
    assert "whose-it-was" not in told.text and "abcabc" not in told.text


def test_stats_are_few_however_many_requests_there_were(plain: Live) -> None:
    for _ in range(30):
        plain.post("/v1/completions", {"prompt": "ab", "max_tokens": 1, "temperature": 0})
    assert len(httpx.get(f"{plain.url}/console/stats", timeout=60).json()["ended"]) == 24


def test_without_statistics_the_view_is_told_so(locked: Live) -> None:
    """live() switches the engine's statistics off unless it is asked."""
    stats = httpx.get(f"{locked.url}/console/stats", headers=KEY, timeout=60).json()
    assert stats["measured"] is False and stats["ended"] == []


def test_a_page_that_asks_every_second_fills_neither_log_nor_metrics(plain: Live, tmp_path: Path) -> None:
    httpx.get(f"{plain.url}/console/stats", timeout=60)
    assert "console/stats" not in httpx.get(f"{plain.url}/metrics", timeout=60).text
    with hosted(tmp_path) as server:
        server.get("/console/stats")
        server.get("/v1/models")
        server.wait_for_line("GET /v1/models")
        assert "GET /console/stats" not in server.log
