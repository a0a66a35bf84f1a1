"""The largest items that prompts of a model may have, by family."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from quire.config import ModelConfig, MultiModalConfig
from quire.engine import largest_media
from quire.media.families import make_family
from quire.media.largest import largest_items
from quire.media.settings import ProcessorFiles
from quire.schema.errors import ConfigError, InputError
from quire.schema.media import MediaItem

CLIP = {"vision_config": {"patch_size": 14, "image_size": 336, "model_type": "clip_vision_model"}}


def items_of(
    name: str, limits: dict[str, Any] | None = None, most: int = 1 << 17, config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, MediaItem]:  # fmt: skip
    family = make_family(name, ProcessorFiles(config if config is not None else CLIP))
    modalities = tuple(family.placeholders)
    return {item.modality: item for item in largest_items(family, modalities, limits or {}, settings or {}, 32, most)}


def test_as_large_as_the_model_takes_them() -> None:
    assert items_of("LlavaProcessor")["image"].length == 576  # whatever the image
    (image,) = items_of(
        "Qwen2VLProcessor", {"video": 0}, settings={"max_pixels": 28 * 28 * 900, "min_pixels": 28}
    ).values()
    assert 800 < image.length <= 900
    assert items_of("InternVLProcessor", {"video": 0})["image"].length == 13 * 144  # 12 tiles, of which a square has 9
    assert items_of("Llama4Processor", config={})["image"].length == 17 * 144


def test_no_larger_than_a_prompt() -> None:
    image = items_of("Qwen2VLProcessor", {"video": 0}, most=300)["image"]
    assert 150 <= image.length <= 300
    audio = items_of("UltravoxProcessor", most=300, config={"audio_config": {"num_mel_bins": 16}})["audio"]
    assert 150 <= audio.length <= 300
    assert items_of("LlavaProcessor", most=575) == {}


def test_sizes_that_were_said() -> None:
    limits = {"image": {"count": 2, "width": 280, "height": 56}, "video": {"num_frames": 4, "width": 56, "height": 56}}
    items = items_of("Qwen2VLProcessor", limits, settings={"min_pixels": 28, "max_pixels": 28 * 28 * 900})
    assert items["image"].length == 20 and items["video"].length == 2 * 4 * 4 // 4
    assert items_of("Qwen2AudioProcessor", {"audio": {"length": 16000}}, config={})["audio"].length == 25
    assert items_of("Qwen2VLProcessor", {"image": 0, "video": {"count": 0}}) == {}


def test_sizes_that_no_item_has() -> None:
    for limits, why in (
        ({"image": {"width": 1 << 30}}, "width is 1073741824; it is from 1 to 32768"),
        ({"video": {"num_frames": 0}}, "num_frames is 0; it is from 1 to 2048"),
        ({"audio": {"width": 3}}, "audio has 'width'; it may have count, length"),
    ):
        with pytest.raises(ConfigError, match=why):
            MultiModalConfig(limit_per_prompt=limits)
    with pytest.raises(InputError, match="pixels; the limit is"):
        items_of("LlavaProcessor", {"image": {"width": 32768, "height": 32768}})


def test_items_that_no_message_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.media.largest._MOST", 4 << 20)
    items = items_of("Qwen2VLProcessor", {"video": {"num_frames": 16, "width": 280, "height": 280}})
    sizes = [sum(len(array.data) for array in item.arrays.values()) for item in items.values()]
    assert len(sizes) == 2 and all(1 << 19 < size <= (4 << 20) for size in sizes)


def test_what_cannot_be_made_is_not_measured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.media.largest.log.info", lambda *words: caplog.messages.append(words[0] % words[1:]))
    assert items_of("LlavaProcessor", settings={"size": "wrong"}) == {}
    for wrong in (ValueError("no files"), AttributeError("not ours"), ImportError("torchvision"), MemoryError()):
        monkeypatch.setattr(largest_media, "family_of", Mock(side_effect=wrong))
        assert largest_media.make_largest(ModelConfig(multimodal_config=MultiModalConfig())).result(30) == ()
