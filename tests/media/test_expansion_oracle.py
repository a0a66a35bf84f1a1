"""Expanded prompts beside transformers' processors: the same input_ids, and vectors where they expect them."""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, WhisperFeatureExtractor

from quire.media.audio import Audio
from quire.media.expand import expand_ids, expand_text, find_places
from quire.media.families import make_family
from quire.media.families.base import Family
from quire.media.settings import ProcessorFiles
from quire.media.video import Video
from quire.text.tokenizer import load_tokenizer
from tests.media.test_pixels_oracle import CLIP, picture
from tests.media.tokens import write_tokenizer

IMAGES = [(64, 48), (90, 200), (333, 120)]
GRID = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
ANYRES = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "image_grid_pinpoints": GRID}
# module, processor, image processor's module and class, its settings, the processor's own settings, config
CASES: dict[str, tuple[str, str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "llava", "LlavaProcessor", "clip", "CLIPImageProcessorPil", CLIP,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, {},
    ),
    "llava next": (
        "llava_next", "LlavaNextProcessor", "llava_next", "LlavaNextImageProcessorPil", ANYRES,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}, {},
    ),
    "llava onevision": (
        "llava_onevision", "LlavaOnevisionProcessor", "llava_onevision", "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": GRID},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"}, {},
    ),
    "qwen2 vl": (
        "qwen2_vl", "Qwen2VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}, {}, {},
    ),
    "qwen2.5 vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil", {}, {}, {}),
    "glm 4.1v": (
        "glm4v", "Glm4vProcessor", "glm4v", "Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}, {}, {},
    ),
    "qianfan ocr": (
        "qianfan_ocr", "QianfanOCRProcessor", "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4}, {"image_seq_length": 4}, {},
    ),
    "gemma 3": (
        "gemma3", "Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}},
        {"image_seq_length": 9}, {},
    ),
    "gemma 3, crops": (
        "gemma3", "Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32,
         "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
        {"image_seq_length": 9}, {},
    ),
    "idefics3": (
        "idefics3", "Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4}, {},
    ),
    "smolvlm": (
        "smolvlm", "SmolVLMProcessor", "smolvlm", "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}, {"image_seq_len": 4}, {},
    ),
    "pixtral": (
        "pixtral", "PixtralProcessor", "pixtral", "PixtralImageProcessorPil",
        {"size": {"longest_edge": 160}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16, "spatial_merge_size": 1}, {},
    ),
    "internvl": (
        "internvl", "InternVLProcessor", "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4}, {"image_seq_length": 4}, {},
    ),
    "deepseek ocr 2": (
        "deepseek_ocr2", "DeepseekOcr2Processor", "deepseek_ocr2", "DeepseekOcr2ImageProcessorPil",
        {"size": {"height": 128, "width": 128}, "tile_size": 64}, {"patch_size": 16, "downsample_ratio": 2}, {},
    ),
    "ovis2": (
        "ovis2", "Ovis2Processor", "ovis2", "Ovis2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6}, {"image_seq_length": 4}, {},
    ),
}  # fmt: skip
TOKENS = {"gemma3": "<start_of_image>", "pixtral": "[IMG]", "internvl": "<IMG_CONTEXT>", "glm4v": "<|image|>"}
TOKENS["qianfan_ocr"] = "<IMG_CONTEXT>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@cache
def theirs(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "start_image_token": "<img>",
        "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def replacements(
    module: str, cls: str, own: dict[str, Any], outputs: Any, tokenizer: Any, num: int, images: Any
) -> list[str]:
    """What transformers writes for each image. The class may need what is not installed (torchvision, num2words), so
    its method is called without making one."""
    with pytest.MonkeyPatch.context() as patch:
        if module == "pixtral":  # which imports torchvision for a method that is not called
            patch.setattr("transformers.utils.is_vision_available", lambda: False)
        kind = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), cls)
    token = TOKENS.get(module, "<image>")
    soft = "<image_soft_token>" * own.get("image_seq_length", 0)
    me = SimpleNamespace(
        image_token="<|image_pad|>" if module.startswith("qwen") else token, image_processor=images,
        tokenizer=tokenizer, fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>",
        global_image_token="<global-img>", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
        start_image_token="<img>", end_image_token="</img>",
        full_image_sequence=f"\n\n<start_of_image>{soft}<end_of_image>\n\n",
        **own,
    )  # fmt: skip
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(kind, name):
            setattr(me, name, getattr(kind, name).__get__(me))
    return [kind.replace_image_token(me, outputs, index) for index in range(num)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_ids_equal_transformers(folder: Any, name: str, count: int) -> None:
    module, cls, image_module, image_cls, settings, own, config = CASES[name]
    tokenizer, ours = theirs(str(folder)), load_tokenizer(str(folder))
    images = [picture(*size) for size in IMAGES[:count]]
    place = f"transformers.models.{image_module}.image_processing_pil_{image_module}"
    processor = getattr(importlib.import_module(place), image_cls)(**settings)
    nested = [images] if module == "llava_onevision" or module in ("idefics3", "smolvlm") else images
    further = {"return_row_col_info": True} if module in ("idefics3", "smolvlm") else {}
    outputs = processor(nested, **further)
    if module == "ovis2":
        outputs["grids"] = np.asarray(outputs["grids"])
    family = make_family(cls, ProcessorFiles(config=config, processor=own, parts={"image": settings}))
    token = family.placeholders["image"]
    written = replacements(module, cls, own, outputs, tokenizer, count, processor)
    text = f"USER: {token}\nWhat is shown here?\n\n" + f"then{token}{token}" * ((count - 1) // 2) + " the"
    pieces = text.split(token)
    expected_text = pieces[0] + "".join(one + piece for one, piece in zip(written, pieces[1:], strict=True))
    expected = tokenizer(expected_text)["input_ids"]

    items = {"image": [family.process("image", image, {}, count) for image in images]}
    ids = ours.encode(expand_text(family, text, items))
    assert ids == expected
    check_places(family, ids, items, ours)
    # ids that are expanded already stay; ids that are not are expanded with the same special tokens
    assert expand_ids(family, ids, items, ours) == ids
    short = ours.encode(text)
    expanded = expand_ids(family, short, items, ours)
    feature = ours.token_to_id(family.feature("image"))
    assert expanded.count(feature) == ids.count(feature)
    if cls != "Gemma3Processor":  # whose line ends merge with those around
        assert expanded == ids


def check_places(family: Family, ids: list[int], items: Any, tokenizer: Any) -> None:
    features = {tokenizer.token_to_id(one) for one in (family.feature("image"), *family.marks.get("image", ()))}
    places = find_places(family, ids, items, tokenizer)
    assert [place.number for place in places] == list(range(len(items["image"])))
    seen = set()
    for place, item in zip(places, items["image"], strict=True):
        mask = place.takes_vector or bytes([1]) * place.length
        assert len(mask) == place.length and sum(mask) == item.num_vectors
        for offset, takes in enumerate(mask):
            assert (ids[place.offset + offset] in features) == bool(takes)
            seen.add(place.offset + offset)
    assert {position for position, one in enumerate(ids) if one in features} <= seen


def test_paligemma(folder: Any) -> None:
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<bos>")
    pil = importlib.import_module("transformers.models.siglip.image_processing_pil_siglip").SiglipImageProcessorPil
    images = pil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    processor = PaliGemmaProcessor(images, tokenizer)
    two = [picture(40, 30), picture(30, 40)]
    expected = processor(images=[two], text=["<image><image>describe the image"])["input_ids"][0]
    settings = {"size": {"height": 28, "width": 28}, "image_seq_length": 4}
    family = make_family("PaliGemmaProcessor", ProcessorFiles(parts={"image": settings}))
    items = {"image": [family.process("image", image, {}, 2) for image in two]}
    ours = load_tokenizer(str(folder))
    assert ours.encode(expand_text(family, "<image><image>describe the image", items)) == list(expected)


@pytest.mark.parametrize("seconds", [0.5, 7.3, 30.0])
def test_qwen2_audio(folder: Any, seconds: float) -> None:
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    tokenizer = theirs(str(folder))
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer)
    samples = np.random.default_rng(0).standard_normal(int(16000 * seconds)).astype(np.float32) * 0.1
    text = "hello <|audio_bos|><|AUDIO|><|audio_eos|> a picture"
    expected = processor(text=text, audio=[samples], sampling_rate=16000)
    family = make_family("Qwen2AudioProcessor", ProcessorFiles())
    items = {"audio": [family.process("audio", Audio(samples, 16000), {}, 1)]}
    ours = load_tokenizer(str(folder))
    assert ours.encode(expand_text(family, text, items)) == list(np.asarray(expected["input_ids"])[0])
    arrays = items["audio"][0].arrays
    np.testing.assert_allclose(arrays["input_features"], np.asarray(expected["input_features"]), atol=3e-4)
    np.testing.assert_array_equal(arrays["feature_attention_mask"], np.asarray(expected["feature_attention_mask"]))


VIDEOS = {
    "Qwen3VLProcessor": ("qwen3_vl", "<|video_pad|>", {"vision_start_token": "<|vision_start|>",
                                                       "vision_end_token": "<|vision_end|>"}),
    "Glm4vProcessor": ("glm4v", "<|video|>", {}),
    "Glm46VProcessor": ("glm46v", "<|video|>", {}),
}  # fmt: skip


@pytest.mark.parametrize("num", [1, 4, 5])
@pytest.mark.parametrize("cls", VIDEOS)
def test_times_between_frames_equal_transformers(folder: Any, cls: str, num: int) -> None:
    """What stands for a video, from the grid that was made of it."""
    from transformers.video_utils import VideoMetadata

    module, token, more = VIDEOS[cls]
    kind = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), cls)
    indices = [round(7.3 * index) for index in range(num)]
    frames = [picture(64, 48)] * num
    settings = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}}
    family = make_family(cls, ProcessorFiles(parts={"video": settings}))
    video = Video(frames, indices, 12.5, 100)
    item = family.process("video", video, {}, 1)
    metadata = VideoMetadata(total_num_frames=100, fps=12.5, frames_indices=indices)
    me = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), video_token=token,
        image_token="<|image|>", **more,
    )  # fmt: skip
    for name in ("replace_frame_token_id", "_calculate_timestamps"):
        if hasattr(kind, name):
            setattr(me, name, getattr(kind, name).__get__(me))
    inputs = {"video_grid_thw": item.arrays["video_grid_thw"], "video_metadata": [metadata]}
    assert item.text == kind.replace_video_token(me, inputs, 0)
    ours = load_tokenizer(str(folder))
    ids = ours.encode(expand_text(family, f"USER: {token} the", {"video": [item]}))
    (place,) = find_places(family, ids, {"video": [item]}, ours)
    assert sum(place.takes_vector or bytes([1]) * place.length) == item.num_vectors
    assert item.text.count(family.feature("video")) == item.num_vectors


def test_gemma_3n(folder: Any) -> None:
    from transformers import Gemma3nAudioFeatureExtractor
    from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor

    tokenizer, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    for kind, end in (("image", "i"), ("audio", "a")):
        names = {f"{kind}_token": f"<{kind}_soft_token>", f"bo{end}_token": f"<start_of_{kind}>",
                 f"eo{end}_token": f"<end_of_{kind}>"}  # fmt: skip
        for name, token in names.items():
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    pil = importlib.import_module("transformers.models.siglip.image_processing_pil_siglip").SiglipImageProcessorPil
    settings = {"size": {"height": 28, "width": 28}, "do_normalize": False}
    own = {"audio_seq_length": 5, "image_seq_length": 4}
    text = "USER: <image_soft_token>\nand<audio_soft_token> hello <image_soft_token>"
    images, sound = [picture(40, 30), picture(30, 40)], np.sin(np.arange(9000) / 7).astype(np.float32)
    processor = Gemma3nProcessor(Gemma3nAudioFeatureExtractor(), pil(**settings), tokenizer, **own)
    expected = processor(images=[images], text=[text], audio=[sound])["input_ids"][0]
    family = make_family("Gemma3nProcessor", ProcessorFiles(processor=own, parts={"image": settings}))
    items = {
        "image": [family.process("image", image, {}, 2) for image in images],
        "audio": [family.process("audio", Audio(sound, 16000), {}, 1)],
    }
    ids = ours.encode(expand_text(family, text, items))
    assert ids == list(expected)
    places = find_places(family, ids, items, ours)
    assert [(place.length, place.number) for place in places] == [(4, 0), (5, 0), (4, 1)]
