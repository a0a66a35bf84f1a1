"""Sizes of DeepSeek's processors, in files and in prompts: refused before pixels are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.config import MultiModalConfig
from quire.media import pixels
from quire.media.families import make_family
from quire.media.families.base import Family
from quire.media.inputs import MediaInputs
from quire.media.settings import ProcessorFiles
from quire.media.sources import MediaSources
from quire.media.workers import MediaWorkers
from quire.schema.errors import InputError

VL2 = "DeepseekVLV2Processor"


@pytest.mark.parametrize(("settings", "said"), [
    ({"candidate_resolutions": 384}, "must be 1 to 1024 pairs, got 384"),
    ({"candidate_resolutions": []}, "must be 1 to 1024 pairs"),
    ({"candidate_resolutions": [[384, 384]] * 1025}, "must be 1 to 1024 pairs"),
    ({"candidate_resolutions": [384, 384]}, "must be pairs of numbers, got 384"),
    ({"candidate_resolutions": [[384, 384, 384]]}, "must be pairs of numbers"),
    ({"candidate_resolutions": [[384, "384"]]}, "must be a whole number from 1 to 4096, got '384'"),
    ({"candidate_resolutions": [[0, 384]]}, "must be a whole number from 1 to 4096, got 0"),
    ({"candidate_resolutions": [[384, 1 << 20]]}, "must be a whole number from 1 to 4096, got 1048576"),
    ({"candidate_resolutions": [[384, 384], [384, 400]]}, "has 384x400 pixels; expected up to 1024 tiles of 384x384"),
    ({"candidate_resolutions": [[32, 32], [4096, 4096]]}, "has 4096x4096 pixels; expected up to 1024 tiles of 32x32"),
    ({"patch_size": 0}, "patch_size of the media processor must be a whole number from 1 to 384"),
    ({"patch_size": 385}, "patch_size of the media processor must be a whole number from 1 to 384"),
    ({"downsample_ratio": 10**9}, "downsample_ratio of the media processor must be a whole number from 1 to 64"),
])  # fmt: skip
def test_hostile_files_of_deepseek_vl2(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_family(VL2, ProcessorFiles(processor=settings))


@pytest.mark.parametrize(("settings", "said"), [
    ({"image_mean": [2.0, 0.5, 0.5]}, "image_mean of the media processor must be three shares"),
    ({"image_mean": [float("nan")] * 3}, "image_mean of the media processor must be three numbers whose size is"),
    ({"image_mean": [0.5]}, "image_mean of the media processor must be three numbers"),
    ({"image_std": [0, 1, 1]}, "image_std of the media processor must be three numbers other than 0"),
    ({"normalize": "yes"}, "normalize of the media processor must be true or false"),
])  # fmt: skip
def test_hostile_levels_of_deepseek_vl2(settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("an image was resized"))
    family = make_family(VL2, ProcessorFiles(processor=settings))
    with pytest.raises(InputError, match=said):
        family.process("image", Image.new("RGB", (40, 30)), {}, 1)


def test_tiles_of_deepseek_vl2_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", "500000")
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("an image was resized"))
    family = make_family(VL2, ProcessorFiles())
    with pytest.raises(InputError, match="7 crops of 384x384 pixels have 1032192 pixels together; the limit is 500000"):
        family.process("image", Image.new("RGB", (800, 600)), {}, 1)


@pytest.mark.parametrize(("width", "height"), [(32768, 1), (1, 32768), (1, 1)])
def test_extreme_proportions(width: int, height: int) -> None:
    item = make_family(VL2, ProcessorFiles()).process("image", Image.new("RGB", (width, height), "red"), {}, 1)
    whole = item.arrays["pixel_values"][0]
    assert whole.shape == (3, 384, 384) and np.isclose(whole[0], 1).any()  # a line of it is left


@pytest.mark.parametrize(("setting", "value"), [
    ("candidate_resolutions", [[4096, 4096]]), ("patch_size", 1), ("downsample_ratio", 1),
])  # fmt: skip
def test_sizes_of_deepseek_vl2_belong_to_the_model(setting: str, value: Any) -> None:
    workers = MediaWorkers(1)
    family = make_family(VL2, ProcessorFiles())
    owner = MediaInputs(family, MediaSources(), MultiModalConfig(mm_processor_cache_gb=0), workers=workers)
    with pytest.raises(InputError, match=f"{setting} .*belongs to the model"):
        owner.load({"image": Image.new("RGB", (40, 30))}, processor_options={setting: value})
    workers.close()


def ocr(**settings: Any) -> Family:
    return make_family(VL2, ProcessorFiles(config={"architectures": ["DeepseekOCRForCausalLM"]}, processor=settings))


@pytest.mark.parametrize(("options", "said"), [
    ({"base_size": 4096}, "base_size of the media processor must be a whole number from 16 to 1280, got 4096"),
    ({"base_size": 8}, "base_size of the media processor must be a whole number from 16 to 1280, got 8"),
    ({"image_size": 1281}, "image_size of the media processor must be a whole number from 16 to 1280, got 1281"),
    ({"image_size": True}, "image_size of the media processor must be a whole number"),
    ({"max_crops": 10**9}, "max_crops of the media processor must be a whole number from 2 to 64"),
    ({"min_crops": 7}, "min_crops of the media processor must be a whole number from 1 to 6, got 7"),
    ({"crop_mode": 3}, "crop_mode of the media processor must be true or false"),
    ({"image_mean": [-1, 0, 0]}, "image_mean of the media processor must be three shares"),
    ({"mode": "gundam"}, "mm_processor_kwargs has 'mode', which this model's processor does not know"),
])  # fmt: skip
def test_hostile_options_of_deepseek_ocr(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("an image was resized"))
    with pytest.raises(InputError, match=said):
        ocr().process("image", Image.new("RGB", (900, 700)), options, 1)


@pytest.mark.parametrize(("settings", "said"), [
    ({"patch_size": 0}, "patch_size of the media processor must be a whole number from 1 to 1024"),
    ({"downsample_ratio": 65}, "downsample_ratio of the media processor must be a whole number from 1 to 64"),
])  # fmt: skip
def test_hostile_files_of_deepseek_ocr(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ocr(**settings)


def test_crops_of_deepseek_ocr_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", "3000000")
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("an image was resized"))
    with pytest.raises(InputError, match="crops of up to 1024x1024 pixels have 3506176 pixels together; the limit is"):
        ocr().process("image", Image.new("RGB", (1500, 1000)), {}, 1)
