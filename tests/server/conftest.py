"""Servers that several tests share: one over the fake worker, two over the embedded model, each per file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import Live, live, live_fake


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("fake")) as server:
        yield server


@pytest.fixture(scope="module")
def smol() -> Iterator[Live]:
    """The embedded model, with everything a request may switch on; in float32, whose answers no batch changes."""
    options = {"trust_request_chat_template": True, "enable_prompt_tokens_details": True}
    engine = {"max_model_len": 512, "served_model_name": "smol", "max_num_seqs": 16, "dtype": "float32"}
    with live(engine=engine, **options) as server:
        yield server


@pytest.fixture(scope="module")
def packed() -> Iterator[Live]:
    """The embedded model as users run it, in a quarter of the time. Its words differ between instruction sets, so it is
    for answers that are held to a form."""
    engine = {"max_model_len": 512, "served_model_name": "smol", "max_num_seqs": 16}
    with live(engine=engine) as server:
        yield server
