"""What the files of a checkpoint say that no item can be processed with is told at start, by key and value."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from PIL import Image

from quire.media.families import make_family
from quire.media.settings import ProcessorFiles
from quire.media.trial import try_items
from quire.media.video import Video
from quire.schema.errors import CheckpointError, ConfigError, InputError

NEXT, ONE_VISION = "LlavaNextProcessor", "LlavaOnevisionProcessor"
TOWER = {"vision_config": {"image_size": 224, "patch_size": 14}}
BIG = 1 << 30


def pinpoints(value: Any) -> ProcessorFiles:
    return ProcessorFiles(config={**TOWER, "image_grid_pinpoints": value})


@pytest.mark.parametrize("name", [NEXT, "LlavaNextVideoProcessor", ONE_VISION])
@pytest.mark.parametrize(("value", "message"), [
    ([[1, 2]], "image_grid_pinpoints has 1x2 pixels; expected 1 to 1024 whole tiles of 224x224"),
    ([[336, 672]], "image_grid_pinpoints has 336x672 pixels; expected 1 to 1024 whole tiles of 224x224"),
    ([[224, 0]], "image_grid_pinpoints of the media processor must be a whole number from 1 to 16384, got 0"),
    ([[224, "448"]], "image_grid_pinpoints of the media processor must be a whole number from 1 to 16384, got '448'"),
    ([[16384, 16352]], "image_grid_pinpoints has 16384x16352 pixels"),
    ([[224]], r"must be 1 to 256 pairs of height and width, got \[\[224\]\]"),
    ("x", "must be 1 to 256 pairs of height and width, got 'x'"),
])  # fmt: skip
def test_resolutions_of_llava(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_family(name, pinpoints(value))


def test_usable_resolutions_of_llava() -> None:
    for name in (NEXT, ONE_VISION):
        family = make_family(name, pinpoints([[224, 448], [448, 224]]))
        try_items(family, ["image"], {})
        with pytest.raises(ConfigError, match="image_grid_pinpoints has 100x100 pixels"):
            try_items(family, ["image"], {"image_grid_pinpoints": [[100, 100]]})


@pytest.mark.parametrize(("name", "files", "message"), [
    ("LlavaProcessor", ProcessorFiles(config=TOWER, processor={"num_additional_image_tokens": BIG}),
     f"num_additional_image_tokens of the media processor must be a whole number from 0 to 65536, got {BIG}"),
    (ONE_VISION, ProcessorFiles(config=TOWER, processor={"num_image_tokens": BIG}), "num_image_tokens of the media"),
    (ONE_VISION, ProcessorFiles(config={"vision_config": {"image_size": "x"}}),
     "image_size of vision_config must be a whole number from 1 to 16384, got 'x'"),
    (ONE_VISION, ProcessorFiles(config={"vision_config": {"patch_size": 1e-300}}), "patch_size of vision_config"),
    (ONE_VISION, ProcessorFiles(config={"vision_aspect_ratio": "anyres_max_x"}),
     "vision_aspect_ratio is 'anyres_max_x'; it must be anyres_max_ and a number from 1 to 1024"),
    (ONE_VISION, ProcessorFiles(config={"vision_aspect_ratio": "anyres_max_0"}), "vision_aspect_ratio is"),
    ("Idefics3Processor", ProcessorFiles(config={"vision_config": {"image_size": [1]}}), "image_size of vision_config"),
    ("Idefics3Processor", ProcessorFiles(config={"scale_factor": 1e-300}), "scale_factor of config.json"),
    ("PaliGemmaProcessor", ProcessorFiles(config={"vision_config": {"patch_size": "7"}}), "patch_size of vision_conf"),
    ("InternVLProcessor", ProcessorFiles(config={"downsample_ratio": 1e300}),
     "downsample_ratio of config.json must be a positive number up to 1, got 1e"),
    ("WhisperProcessor", ProcessorFiles(parts={"audio": {"sampling_rate": 3}}),
     "hears 90 samples at once .*, fewer than hop_length, which is 160"),
    ("InternVLProcessor", ProcessorFiles(config={"downsample_ratio": "x"}), "downsample_ratio of config.json"),
])  # fmt: skip
def test_numbers_that_were_not_checked(name: str, files: ProcessorFiles, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_family(name, files)


QWEN = ("Qwen2VLProcessor", "Qwen3VLProcessor", "VideoLlama3Processor", "PaddleOCRVLProcessor", "Glm4vProcessor")


@pytest.mark.parametrize("depth", [5, BIG])
@pytest.mark.parametrize("name", QWEN)
def test_frames_that_are_merged(name: str, depth: int) -> None:
    """An image is repeated as often: refused before there is memory for it."""
    setting = {"temporal_patch_size": depth}
    family = make_family(name, ProcessorFiles(parts={"image": setting, "video": setting}))
    items = {"image": Image.new("RGB", (64, 64)), "video": Video([Image.new("RGB", (64, 64))] * 2, [0, 1], 1.0, 2)}
    for modality in family.placeholders:
        tracemalloc.start()
        try:
            with pytest.raises(InputError, match=f"temporal_patch_size .* from 1 to 4, got {depth}"):
                family.process(modality, items[modality], {}, 1)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_tiles_are_resized_only_if_all_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part may have so many pixels before it is cropped; together they had no limit."""
    sizes = {"size": {"height": 8000, "width": 8000}, "crop_size": {"height": 224, "width": 224}}
    files = ProcessorFiles(config={**TOWER, "image_grid_pinpoints": [[448, 448]]}, parts={"image": sizes})
    family = make_family(NEXT, files)
    monkeypatch.setattr("quire.media.families.llava.resized", lambda *_: pytest.fail("a part was resized"))
    with pytest.raises(InputError, match="5 crops of 8000x8000 pixels have 320000000 pixels together"):
        family.process("image", Image.new("RGB", (64, 64)), {}, 1)


@pytest.mark.parametrize(
    "levels", [{"image_std": [1e-300, 1, 1]}, {"image_mean": [1e300, 0, 0]}, {"rescale_factor": 1e300}]
)
def test_levels_stay_numbers(levels: dict[str, Any]) -> None:
    (name,) = levels
    family = make_family("Qwen2VLProcessor", ProcessorFiles(parts={"image": levels}))
    with pytest.raises(CheckpointError, match=f"image items cannot be processed.*{name} of the media processor"):
        try_items(family, ["image"], {})


def test_whom_a_trial_blames(caplog: pytest.LogCaptureFixture) -> None:
    family = make_family(ONE_VISION, ProcessorFiles(config=TOWER))
    try_items(family, ["image", "video"], {})
    with caplog.at_level("WARNING"):
        try_items(family, ["image", "video"], {"num_frames": 4})  # of videos only
    assert "No image item can be processed with the engine's mm_processor_kwargs" in caplog.text
    with pytest.raises(ConfigError, match="mm_processor_kwargs has 'speed'"):
        try_items(family, ["image", "video"], {"speed": 4})
    broken = make_family("Qwen2VLProcessor", ProcessorFiles(parts={"image": {"patch_size": "x"}}))
    with pytest.raises(CheckpointError, match=r"patch_size .* got 'x' \(--language-model-only"):
        try_items(broken, ["image"], {"max_pixels": 1 << 20})
    try_items(broken, ["image"], {"patch_size": 14})  # the engine's option is in its place
    few = make_family("LlavaProcessor", ProcessorFiles(config={"vision_config": {"patch_size": 16384}}))
    with pytest.raises(CheckpointError, match="would have -1 vectors"):
        try_items(few, ["image"], {})
