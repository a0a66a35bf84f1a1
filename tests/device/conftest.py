"""Engines of tests/device run on the GPU unless a test names another device: tests/conftest.py chooses the CPU for
every other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.base import env


@pytest.fixture(autouse=True)
def _on_the_gpu(_fresh_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_TARGET_DEVICE", "cuda")
    env.forget_all()
    yield
