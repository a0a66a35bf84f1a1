"""The time a request may take: the server's limit caps what a client says in X-Request-Timeout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import Live, error_of, live_fake

PATH = "/v1/completions"
LIMIT_S = 0.8
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "vllm_xargs": {"sleep": 0.05}}  # 20 seconds


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(Path(tmp_path_factory.mktemp("limited")), request_timeout=LIMIT_S) as server:
        yield server


@pytest.mark.parametrize(("given", "allowed"), [(None, "0.8"), ("60", "0.8"), ("0.8", "0.8"), ("0.3", "0.3")])
def test_the_shorter_of_both_times_ends_a_request(limited: Live, given: str | None, allowed: str) -> None:
    headers = {} if given is None else {"X-Request-Timeout": given}
    error = error_of(limited.post(PATH, LONG, headers=headers), 504)
    assert error["message"] == f"the request was not finished after {allowed} s, the time it was given"


def test_a_request_within_its_time_is_answered(limited: Live) -> None:
    short = {"prompt": "abc", "max_tokens": 2}
    assert limited.post(PATH, short, headers={"X-Request-Timeout": "60"}).status_code == 200
