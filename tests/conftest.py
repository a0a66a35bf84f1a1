"""What every test may rely on: no network, one thread, blocks audited at every step, no environment left over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QUIRE_TARGET_DEVICE", "cpu")  # tests/device name their device
os.environ.setdefault("QUIRE_CPU_NUM_THREADS", "1")
os.environ.setdefault("QUIRE_AUDIT", "1")
os.environ.setdefault("QUIRE_CPU_KVCACHE_SPACE", "0.5")
os.environ.setdefault("QUIRE_CPU_PACKED_CACHE", "0")  # nothing of the user's cache is read or written

import pytest

from quire.base import env

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored


@pytest.fixture(autouse=True)
def _fresh_environment() -> Iterator[None]:
    """A test may set variables with monkeypatch.setenv; the next one reads the environment anew."""
    env.forget_all()
    yield
    env.forget_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
