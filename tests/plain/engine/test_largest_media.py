"""When the memory of encoders is measured: on a GPU, of a model with an encoder, unless it was said not to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import MultiModalConfig
from quire.engine import largest_media, start
from quire.engine.start import _largest_media
from quire.executor.base import WorkerProtocol
from quire.schema.errors import ConfigError
from quire.schema.kv import ModelInfo


def config(device: str = "cuda", *, configured: int | None = None, **model: Any) -> Any:
    plain = dict(takes_encoder=True, is_encoder_decoder=False, is_pooling=False, multimodal_config=None)
    return SimpleNamespace(
        device_config=SimpleNamespace(device=device), cache_config=SimpleNamespace(kv_cache_memory_bytes=configured),
        model_config=SimpleNamespace(**plain | model),
    )  # fmt: skip


class Ranks:
    """One worker that has room for the KV cache only if nothing is left for an encoder."""

    def __init__(self, needed: int) -> None:
        self.needed, self.is_media_left = needed, True

    def ask(self, verb: Any, *given: Any) -> list[Any]:
        if verb is WorkerProtocol.measure_media:
            assert given == ((),)
            self.is_media_left = False
            return [None]
        assert verb is WorkerProtocol.free_bytes
        return [50]


def test_a_start_whose_kv_cache_is_too_small_beside_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = Ranks(40)
    infos = [ModelInfo(specs=(), vocab_size=9, max_positions=64, num_parameters=10, weight_bytes=100)]

    def place(config: Any, info: ModelInfo, free_bytes: list[int]) -> Any:
        if free_bytes[0] < ranks.needed:
            raise ConfigError(f"{free_bytes[0]} bytes are too few")
        return free_bytes

    monkeypatch.setattr(start, "_place", place)
    assert start._place_beside(config(), ranks, infos, [45], with_media=True) == [45] and ranks.is_media_left
    with pytest.raises(ConfigError, match="30 bytes are too few"):
        start._place_beside(config(), ranks, infos, [30], with_media=False)
    assert ranks.is_media_left
    assert start._place_beside(config(), ranks, infos, [30], with_media=True) == [50] and not ranks.is_media_left
    ranks.needed = 60
    with pytest.raises(ConfigError, match="50 bytes are too few"):
        start._place_beside(config(), ranks, infos, [30], with_media=True)


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
