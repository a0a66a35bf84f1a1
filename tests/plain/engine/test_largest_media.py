"""When the memory of encoders is measured: on a GPU, of a model with an encoder, unless it was said not to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import MultiModalConfig
from quire.engine import largest_media
from quire.engine.start import _largest_media


def config(device: str = "cuda", *, configured: int | None = None, **model: Any) -> Any:
    plain = dict(takes_encoder=True, is_encoder_decoder=False, is_pooling=False, multimodal_config=None)
    return SimpleNamespace(
        device_config=SimpleNamespace(device=device), cache_config=SimpleNamespace(kv_cache_memory_bytes=configured),
        model_config=SimpleNamespace(**plain | model),
    )  # fmt: skip


def test_when_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_media, "make_largest", lambda model: "made")
    assert _largest_media(config()) == "made"
    assert _largest_media(config(multimodal_config=MultiModalConfig())) == "made"
    assert _largest_media(config(multimodal_config=MultiModalConfig(skip_mm_profiling=True))) is None
    assert _largest_media(config("cpu")) is None
    assert _largest_media(config(configured=1 << 30)) is None
    assert _largest_media(config(takes_encoder=False)) is None
    assert _largest_media(config(is_encoder_decoder=True)) is None
    assert _largest_media(config(is_pooling=True)) is None
