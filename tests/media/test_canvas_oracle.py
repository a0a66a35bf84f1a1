"""Llama 4, Cohere2 Vision and LFM2-VL beside transformers' processors, which want torchvision: canvases, tiles, masks,
counts and texts are equal, pixels within two levels of Pillow's. LLaVA-NeXT-Video and Video-LLaVA, of which the
processors as a whole want it: their parts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_utils import SizeDict

from quire.media.families import make_family
from quire.media.families.canvases import HalfLevels, cohere_grid, llama4_grid
from quire.media.settings import ProcessorFiles
from quire.media.video import Video
from quire.schema.errors import InputError
from tests.media.test_pixels_oracle import picture
from tests.media.test_torchvision_oracle import COMMON, HALF, SIDE, SIZES, near, processor_of, tensor_of, torchvision

__all__ = ["torchvision"]  # a fixture
MANY = (*SIZES, (56, 56), (55, 57), (112, 56), (1, 900), (900, 1), (300, 100), (100, 301), (700, 640), (1000, 999))
BOX = {"height": SIDE, "width": SIDE}


def writer(module: str, cls: str, **own: Any) -> Any:
    """A processor as its methods see it that write an item."""
    kind = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), cls)
    me = SimpleNamespace(**own)
    for name in vars(kind):
        if name.startswith(("_", "replace")) and callable(vars(kind)[name]) and not name.startswith("__"):
            setattr(me, name, vars(kind)[name].__get__(me))
    return me


@pytest.mark.parametrize(("most", "is_largest"), [(16, False), (5, False), (1, False), (9, True)])
def test_llama_4(torchvision: None, monkeypatch: pytest.MonkeyPatch, most: int, is_largest: bool) -> None:
    theirs = processor_of(monkeypatch, "llama4", "Llama4ImageProcessor", "bilinear")
    settings = {"max_patches": most, "resize_to_max_canvas": is_largest}
    files = ProcessorFiles(processor={"patch_size": 14}, parts={"image": {**settings, "size": BOX}})
    family = make_family("Llama4Processor", files)
    tokens = writer("llama4", "Llama4Processor", patch_size=14, downsample_ratio=4)
    for size in MANY:
        image = picture(*size)
        want = theirs._preprocess(
            images=[tensor_of(image)], size=SizeDict(**BOX), disable_grouping=True, **settings,
            **COMMON | {"resample": 2},
        )  # fmt: skip
        item = family.process("image", image, {}, 1)
        assert item.arrays["pixel_values"].shape == tuple(want["pixel_values"][0].shape), size
        near(item.arrays["pixel_values"], want["pixel_values"][0], most=3.01)
        assert item.text == tokens.replace_image_token({"pixel_values": want["pixel_values"][0:1],
                                                        "aspect_ratios": want["aspect_ratios"]}, 0)  # fmt: skip
        assert item.num_vectors == item.text.count("<|patch|>") == 4 * len(want["pixel_values"][0])


def test_levels_of_llama_4_are_those_of_torch() -> None:
    """Every byte, in bfloat16 throughout."""
    mean, std = (0.48, 0.5, 0.41), (0.27, 0.5, 0.26)
    levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    scaled = levels.to(torch.bfloat16) * (1 / 255)
    parts = (torch.tensor(values, dtype=torch.bfloat16)[:, None, None] for values in (mean, std))
    want = scaled.sub(next(parts)).div(next(parts)).float().numpy()
    np.testing.assert_array_equal(HalfLevels(1 / 255, mean, std).apply(levels.numpy()), want)


@pytest.mark.parametrize(("most", "cut"), [(12, True), (4, True), (1, True), (12, False)])
def test_cohere2_vision(torchvision: None, monkeypatch: pytest.MonkeyPatch, most: int, cut: bool) -> None:
    theirs = processor_of(monkeypatch, "cohere2_vision", "Cohere2VisionImageProcessor")
    settings = {"max_patches": most, "min_patches": 1, "crop_to_patches": cut}
    part = {**settings, "size": BOX, "patch_size": 2, "image_mean": HALF, "image_std": HALF}
    family = make_family("Cohere2VisionProcessor", ProcessorFiles(parts={"image": part}))
    tokens = writer(
        "cohere2_vision", "Cohere2VisionProcessor", patch_size=2, image_token="<|IMG_PATCH|>",
        boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>", img_line_break_token="<|IMG_LINE_BREAK|>",
    )  # fmt: skip
    for size in MANY:
        image = picture(*size)
        want = theirs._preprocess(
            images=[tensor_of(image)], size=SizeDict(**BOX), disable_grouping=True, **settings, **COMMON
        )
        pixels = np.stack([np.asarray(one) for one in want["pixel_values"]])
        item = family.process("image", image, {}, 1)
        assert item.arrays["pixel_values"].shape == pixels.shape, size
        near(item.arrays["pixel_values"], pixels)
        assert item.text == tokens.replace_image_token(want, 0)
        assert item.num_vectors == item.text.count("<|IMG_PATCH|>") == 4 * len(pixels)


LFM: dict[str, Any] = dict(
    downsample_factor=2, min_tiles=2, max_tiles=10, use_thumbnail=True, min_image_tokens=4, max_image_tokens=16,
    encoder_patch_size=7, tile_size=56, max_pixels_tolerance=2.0, do_image_splitting=True,
)  # fmt: skip


@pytest.mark.parametrize("over", [
    {}, {"use_thumbnail": False}, {"do_image_splitting": False}, {"max_tiles": 4, "tile_size": 28},
    {"downsample_factor": 3, "tile_size": 63},
])  # fmt: skip
def test_lfm2_vl(torchvision: None, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any]) -> None:
    settings = LFM | over
    theirs = processor_of(monkeypatch, "lfm2_vl", "Lfm2VlImageProcessor", "bilinear")
    family = make_family("Lfm2VlProcessor", ProcessorFiles(parts={"image": settings}))
    tokens = writer(
        "lfm2_vl", "Lfm2VlProcessor", image_processor=SimpleNamespace(**settings), image_token="<image>",
        image_start_token="<|image_start|>", image_end_token="<|image_end|>", image_thumbnail_token="<|img_thumbnail|>",
    )  # fmt: skip
    for size in (one for one in MANY if min(one) > 1):
        image = picture(*size)
        want = theirs._preprocess(
            images=[tensor_of(image)], do_pad=True, return_row_col_info=True, disable_grouping=True, **settings,
            **COMMON | {"resample": 2},
        )  # fmt: skip
        item = family.process("image", image, {}, 1)
        for name in ("pixel_attention_mask", "spatial_shapes"):
            np.testing.assert_array_equal(item.arrays[name], want[name], err_msg=f"{name} of {size}")
        assert item.arrays["pixel_values"].shape == tuple(want["pixel_values"].shape), size
        near(item.arrays["pixel_values"], want["pixel_values"])
        assert item.text == tokens.replace_image_token(want, 0, use_image_special_tokens=True)
        assert item.num_vectors == item.text.count("<image>")


def test_llava_next_video() -> None:
    """An image is LLaVA-NeXT's; of a video, places as transformers writes them."""
    config = {"vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}}
    part = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    grid = {**part, "image_grid_pinpoints": [[56, 112], [112, 56]]}
    files = ProcessorFiles(config, {"patch_size": 14}, {"image": grid, "video": part})
    family, plain = (make_family(f"LlavaNext{kind}Processor", files) for kind in ("Video", ""))
    one, other = (both.process("image", picture(90, 60), {}, 1) for both in (family, plain))
    assert one.text == other.text and all((one.arrays[name] == other.arrays[name]).all() for name in other.arrays)
    item = family.process("video", Video([picture(90, 60)] * 3, [0, 1, 2], 1.0, 3), {}, 1)
    me = writer("llava_next_video", "LlavaNextVideoProcessor", patch_size=14, video_token="<video>")
    assert item.text == me.replace_video_token(item.arrays, 0) and item.num_vectors == 3 * 4
    image = importlib.import_module("transformers.models.clip.image_processing_pil_clip").CLIPImageProcessorPil
    want = image(**part)(picture(90, 60), return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(item.arrays["pixel_values_videos"][0, 1], want)
    with pytest.raises(InputError, match="frames of the video have different sizes"):
        frames = [picture(90, 60), picture(60, 90)]
        family.process("video", Video(frames, [0, 1], 1.0, 2), {"do_center_crop": False}, 1)


def test_video_llava() -> None:
    from transformers.models.video_llava.image_processing_video_llava import VideoLlavaImageProcessor

    part = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    config = {"vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}}
    family = make_family("VideoLlavaProcessor", ProcessorFiles(config, {}, {"image": part}))
    me = writer("video_llava", "VideoLlavaProcessor", patch_size=14, image_token="<image>",
                num_additional_image_tokens=1, vision_feature_select_strategy="default")  # fmt: skip
    for size in ((90, 60), (56, 56), (40, 200)):
        item = family.process("image", picture(*size), {}, 1)
        want = VideoLlavaImageProcessor(**part)(images=picture(*size), return_tensors="np")
        name = "pixel_values_images" if "pixel_values_images" in want else "pixel_values"
        np.testing.assert_allclose(item.arrays["pixel_values_images"], want[name], atol=2e-6)
        assert item.text == me.replace_image_token(item.arrays, 0) and item.num_vectors == 16


@pytest.mark.parametrize(("name", "options", "message"), [
    ("Llama4Processor", {"max_patches": 1 << 40}, "from 1 to 64"), ("Llama4Processor", {"max_patches": 0}, "from 1 to"),
    ("Llama4Processor", {"size": {"height": 56, "width": 63}}, "must be a square"),
    ("Llama4Processor", {"size": {"height": 8192, "width": 8192}}, "up to 4096"),
    ("Llama4Processor", {"do_resize": False}, "lie on a canvas of tiles"),
    ("Cohere2VisionProcessor", {"max_patches": 1 << 40}, "from 1 to 64"),
    ("Cohere2VisionProcessor", {"size": {"height": 9000, "width": 9000}}, "up to 4096"),
    ("Lfm2VlProcessor", {"max_tiles": 1 << 40}, "from 1 to 64"), ("Lfm2VlProcessor", {"min_tiles": 11}, "from 1 to 10"),
    ("Lfm2VlProcessor", {"max_image_tokens": 1 << 40}, "from 1 to 65536"),
    ("Lfm2VlProcessor", {"tile_size": 1 << 20}, "from 1 to 4096"), ("Lfm2VlProcessor", {"tile_size": 500}, "multiple"),
    ("Lfm2VlProcessor", {"max_pixels_tolerance": float("nan")}, "a positive number"),
])  # fmt: skip
def test_settings_are_bounded(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_family(name, ProcessorFiles()).process("image", picture(64, 48), options, 1)


def test_tiles_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", str(9 * 336 * 336))
    with pytest.raises(InputError, match="10 crops of 336x336 pixels have 1128960 pixels together"):
        make_family("Llama4Processor", ProcessorFiles()).process("image", picture(900, 900), {}, 1)


def test_padding_of_lfm2_vl_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile is filled up to as many patches as the whole image may have."""
    image = picture(64, 64)
    monkeypatch.setattr(np, "zeros", lambda *_: pytest.fail("patches were allocated"))
    options = {"max_image_tokens": 1 << 16, "max_pixels_tolerance": 1e-9, "min_tiles": 60, "max_tiles": 64}
    with pytest.raises(InputError, match=r"crops of 8192x8192 pixels have .* use fewer .max_tiles, max_image_tokens"):
        make_family("Lfm2VlProcessor", ProcessorFiles()).process("image", image, options, 1)


@pytest.mark.parametrize("ratio", [5e-324, 1e-200, 1 / 65, 1.5, 1e300])
def test_the_shuffle_of_llama_4_is_bounded(ratio: float) -> None:
    with pytest.raises(InputError, match=r"pixel_shuffle_ratio is .* from 1/64 to 1"):
        make_family("Llama4Processor", ProcessorFiles({"vision_config": {"pixel_shuffle_ratio": ratio}}))


@pytest.mark.parametrize("size", [(3000, 20), (20, 9000)])
def test_a_narrow_image_of_lfm2_vl(size: tuple[int, int]) -> None:
    part = {"do_image_splitting": False, "max_image_tokens": 64, "min_image_tokens": 16}
    with pytest.raises(InputError, match="too narrow: it would have more than 256 patches"):
        make_family("Lfm2VlProcessor", ProcessorFiles(parts={"image": part})).process("image", picture(*size), {}, 1)


def test_grids() -> None:
    assert llama4_grid((200, 300), 224, 3, False) == (1, 2)
    assert llama4_grid((1, 10_000), 336, 16, False) == (1, 16)
    assert cohere_grid((512, 512), 512, 12) == (1, 1) and cohere_grid((5000, 5000), 512, 12) == (3, 3)
