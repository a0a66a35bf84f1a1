"""Arrays of every family beside those of transformers' image processors that use Pillow: equal to the last bit."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from PIL import Image

from quire.media.families import make_family
from quire.media.settings import ProcessorFiles

SIZES = ((64, 48), (333, 500), (500, 333), (31, 29), (1300, 700), (90, 1000), (336, 336))
VISION = {"patch_size": 14}
CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
# family, transformers' module and class, its settings, further keywords of the call, vision_config
CASES = {
    "llava": ("LlavaProcessor", "clip", "CLIPImageProcessorPil", CLIP, {}, {"patch_size": 14}),
    "llava padded": ("LlavaProcessor", "llava", "LlavaImageProcessorPil", {**CLIP, "do_pad": True}, {}, VISION),
    "llava crop is larger": (
        "LlavaProcessor", "clip", "CLIPImageProcessorPil", {**CLIP, "crop_size": {"height": 70, "width": 61}}, {},
        {"patch_size": 14},
    ),
    "llava next": (
        "LlavaNextProcessor", "llava_next", "LlavaNextImageProcessorPil",
        {**CLIP, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]}, {}, VISION,
    ),
    "llava onevision": (
        "LlavaOnevisionProcessor", "llava_onevision", "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}, {},
        {"patch_size": 14, "image_size": 56},
    ),
    "qwen2 vl": (
        "Qwen2VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}, {}, {},
    ),
    "qwen2 vl, options": (
        "Qwen2_5_VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil", {},
        {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16}, {},
    ),
    "qwen3 vl": (
        "Qwen3VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3,
         "image_std": [0.5] * 3}, {}, {},
    ),
    "glm 4.1v": (
        "Glm4vProcessor", "glm4v", "Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 100}}, {}, {},
    ),
    "videollama 3": (
        "VideoLlama3Processor", "video_llama_3", "VideoLlama3ImageProcessorPil",
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, "merge_size": 2}, {}, {},
    ),
    "paddleocr vl": (
        "PaddleOCRVLProcessor", "paddleocr_vl", "PaddleOCRVLImageProcessorPil",
        {"size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 64}}, {}, {},
    ),
    "glm 4.6v": ("Glm46VProcessor", "glm46v", "Glm46VImageProcessorPil", {}, {}, {}),
    "gemma 3": ("Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}, {}, {}),
    "gemma 3, crops": (
        "Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64,
         "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}, {}, {},
    ),
    "gemma 3n": (
        "Gemma3nProcessor", "siglip", "SiglipImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "do_normalize": False, "resample": 2}, {}, {},
    ),
    "paligemma": (
        "PaliGemmaProcessor", "siglip", "SiglipImageProcessorPil", {"size": {"height": 56, "width": 56}}, {}, {},
    ),
    "idefics3": (
        "Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}, {}, {},
    ),
    "idefics3, not split": (
        "Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False}, {}, {},
    ),
    "smolvlm": (
        "SmolVLMProcessor", "smolvlm", "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}, {}, {},
    ),
    "pixtral": (
        "PixtralProcessor", "pixtral", "PixtralImageProcessorPil",
        {"size": {"longest_edge": 160}, "patch_size": {"height": 16, "width": 16}}, {}, {"patch_size": 16},
    ),
    "internvl": (
        "InternVLProcessor", "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6}, {}, {},
    ),
    "deepseek ocr 2": (
        "DeepseekOcr2Processor", "deepseek_ocr2", "DeepseekOcr2ImageProcessorPil",
        {"size": {"height": 80, "width": 80}, "tile_size": 56}, {}, {},
    ),
    "deepseek ocr 2, no tiles": (
        "DeepseekOcr2Processor", "deepseek_ocr2", "DeepseekOcr2ImageProcessorPil",
        {"size": {"height": 80, "width": 80}, "tile_size": 56, "crop_to_patches": False}, {}, {},
    ),
    "ovis2": ("Ovis2Processor", "ovis2", "Ovis2ImageProcessorPil", {"size": {"height": 56, "width": 56}}, {}, {}),
    "ovis2, tiles": (
        "Ovis2Processor", "ovis2", "Ovis2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 9}, {}, {},
    ),
    "ovis2, tiles of its proportions": (
        "Ovis2Processor", "ovis2", "Ovis2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6,
         "use_covering_area_grid": False}, {}, {},
    ),
}  # fmt: skip


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * 10007 + height)
    coarse = rng.integers(0, 256, (max(2, height // 9), max(2, width // 9), len(mode)), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR))
    noise = rng.integers(-20, 20, smooth.shape)
    return Image.fromarray(np.clip(smooth.astype(int) + noise, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("name", CASES)
def test_pixels_equal_transformers(name: str) -> None:
    family_name, module, cls, settings, options, vision = CASES[name]
    theirs = getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), cls)(
        **settings
    )
    files = ProcessorFiles(config={"vision_config": vision}, parts={"image": settings})
    family = make_family(family_name, files)
    for width, height in SIZES:
        image = picture(width, height)
        ours = family.process("image", image, options, 1)
        expected = theirs(image, **options, return_tensors="np")
        for key in (
            "pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "image_merge_sizes", "grids",
            "pixel_values_local", "num_local_patches",
        ):  # fmt: skip
            if key not in expected:
                assert key not in ours.arrays
                continue
            want = np.asarray(expected[key])
            assert ours.arrays[key].shape == want.shape, (key, width, height)
            assert ours.arrays[key].dtype == want.dtype, key
            np.testing.assert_array_equal(ours.arrays[key], want, err_msg=f"{key} of {width}x{height}")


def test_transparency_lies_on_white_as_in_transformers() -> None:
    theirs = importlib.import_module("transformers.models.clip.image_processing_pil_clip").CLIPImageProcessorPil(**CLIP)
    files = ProcessorFiles(config={"vision_config": {"patch_size": 14}}, parts={"image": CLIP})
    family = make_family("LlavaProcessor", files)
    from quire.media.images import read_image

    for image in (picture(80, 60, "RGBA"), picture(80, 60).convert("L"), picture(80, 60).convert("P")):
        ours = family.process("image", read_image(image), {}, 1).arrays["pixel_values"]
        np.testing.assert_array_equal(ours, np.asarray(theirs(image)["pixel_values"]))
