"""Servers that several tests share: one over the fake worker, one over the embedded model, each per file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.ops.cpu.native import kernels
from tests.server.live import Live, live, live_fake


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("fake")) as server:
        yield server


@pytest.fixture(scope="module")
def smol_dtype() -> str:
    """No batch changes the answers of either: weights packed for the kernels (tests/engine/test_cpu_same_bits.py), or
    float32, which takes four times as long. A file that looks for words takes float32: those of packed weights differ
    between instruction sets."""
    return "auto" if kernels() is not None else "float32"


@pytest.fixture(scope="module")
def smol(smol_dtype: str) -> Iterator[Live]:
    """The embedded model, with everything a request may switch on."""
    options = {"trust_request_chat_template": True, "enable_prompt_tokens_details": True}
    engine = {"max_model_len": 512, "served_model_name": "smol", "max_num_seqs": 16, "dtype": smol_dtype}
    with live(engine=engine, **options) as server:
        yield server
