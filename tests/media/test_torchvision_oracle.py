"""Families whose processors transformers has for torchvision only, which is not installed: their code runs over torch's
own resizing, which torchvision calls. Grids, crops, masks, counts are equal, pixels within two levels of Pillow's;
those of Molmo 2, which are not averaged, equal but for ties."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import Phi4MultimodalFeatureExtractor

from quire.media import pixels
from quire.media.audio import Audio
from quire.media.families import make_family
from quire.media.settings import ProcessorFiles
from quire.media.video import Video
from quire.schema.errors import InputError
from tests.media.test_pixels_oracle import picture

SIZES = ((64, 48), (333, 500), (500, 333), (31, 29), (900, 500), (90, 600), (112, 112))
HALF = [0.5, 0.5, 0.5]
SIDE = 56


def resize(image: torch.Tensor, size: list[int], mode: str = "bilinear", antialias: bool = True) -> torch.Tensor:
    batch = image if image.ndim == 4 else image[None]
    out = functional.interpolate(batch, size=tuple(size), mode=mode, align_corners=False, antialias=antialias)
    return out if image.ndim == 4 else out[0]


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What these processors use of it."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in names}
    tools = ModuleType("torchvision.transforms.v2.functional")
    tools.resize = resize  # type: ignore[attr-defined]
    tools.pad = lambda image, padding, fill: functional.pad(  # type: ignore[attr-defined]
        image, (padding[0], padding[2], padding[1], padding[3]), value=fill[0]
    )
    modules[names[-1]].functional = tools  # type: ignore[attr-defined]
    for name, module in {**modules, tools.__name__: tools}.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in ("phi4_multimodal", "perception_lm", "molmo2", "kimi_k25", "llama4", "cohere2_vision", "lfm2_vl"):
        for kind in ("image", "video"):
            sys.modules.pop(f"transformers.models.{name}.{kind}_processing_{name}", None)


def processor_of(
    monkeypatch: pytest.MonkeyPatch, name: str, cls: str, mode: str = "bicubic", modality: str = "image"
) -> Any:
    kind = getattr(importlib.import_module(f"transformers.models.{name}.{modality}_processing_{name}"), cls)

    class Processor(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            """Without the check that torchvision is installed."""

        def rescale_and_normalize(self, images: Any, *settings: Any) -> Any:
            return (images.float() / 255 - 0.5) / 0.5

    def resized(self: Any, image: Any, size: Any, resample: Any = None, antialias: bool = True, **more: Any) -> Any:
        return resize(image, [size.height, size.width], mode, antialias)

    monkeypatch.setattr(kind.__mro__[1], "resize", resized, raising=False)
    return Processor()


COMMON: dict[str, Any] = dict(
    do_resize=True, resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=HALF,
    image_std=HALF, return_tensors=None,
)  # fmt: skip


def tensor_of(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


def near(ours: Any, theirs: Any, most: float = 2.01) -> None:
    levels = np.abs(ours - np.asarray(theirs)) * 127.5
    assert levels.max() <= most and levels.mean() < 0.6


@pytest.mark.parametrize("kind", ["thumb+tile", "vanilla"])
def test_perception_lm(torchvision: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    theirs = processor_of(monkeypatch, "perception_lm", "PerceptionLMImageProcessor")
    theirs.max_num_tiles = 9
    settings = {"tile_size": SIDE, "max_num_tiles": 9, "vision_input_type": kind}
    files = ProcessorFiles(processor={"patch_size": 14, "pooling_ratio": 2}, parts={"image": settings})
    family = make_family("PerceptionLMProcessor", files)
    for size in SIZES:
        image = picture(*size)
        expected = theirs._preprocess(images=[tensor_of(image)], disable_grouping=True, **settings, **COMMON)
        (want,) = expected["pixel_values"]
        item = family.process("image", image, {}, 1)
        assert item.arrays["pixel_values"][0].shape == tuple(want.shape), size
        near(item.arrays["pixel_values"][0], want)
        assert item.num_vectors == len(want) * 4 and item.text == "<|image|>" * item.num_vectors


def test_phi_4(torchvision: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.image_utils import SizeDict

    theirs = processor_of(monkeypatch, "phi4_multimodal", "Phi4MultimodalImageProcessor")
    settings = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": 9, "patch_size": 7}
    family = make_family("Phi4MultimodalProcessor", ProcessorFiles(parts={"image": settings}))
    for size in SIZES:
        image = picture(*size)
        expected = theirs._preprocess(
            images=[tensor_of(image)], patch_size=7, dynamic_hd=9, size=SizeDict(height=SIDE, width=SIDE), **COMMON
        )
        item = family.process("image", image, {}, 1)
        for name in ("image_sizes", "image_attention_mask"):
            np.testing.assert_array_equal(item.arrays[name], expected[name], err_msg=f"{name} of {size}")
        assert item.arrays["image_pixel_values"].shape == tuple(expected["image_pixel_values"].shape)
        near(item.arrays["image_pixel_values"][0, 1:], expected["image_pixel_values"][0, 1:])
        # theirs counts 256 and 16 vectors of the whole image, whatever its size; here it has 4 by 4, and 4 ends of rows
        assert item.num_vectors == expected["num_img_tokens"][0] - 256 - 16 + 4 * 4 + 4
    with pytest.raises(InputError, match="too narrow"):
        family.process("image", picture(3000, 20), {}, 1)


def test_crops_of_phi_4_are_those_of_its_repository() -> None:
    """Its own processor resizes with Pillow, and samples the whole image from what the model reads."""
    settings = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": 9, "patch_size": 7}
    family = make_family("Phi4MMProcessor", ProcessorFiles(parts={"image": settings}))
    for size in SIZES:
        image = picture(*size)
        item = family.process("image", image, {}, 1)
        (height, width), (ours,) = item.arrays["image_sizes"][0], item.arrays["image_pixel_values"]
        scale = min(width / image.width, height / image.height)
        small = image.resize((int(image.width * scale), int(image.height * scale)), 2)
        canvas = torch.full((3, height, width), 1.0)
        canvas[:, : small.height, : small.width] = (tensor_of(small).float() / 255 - 0.5) / 0.5
        rows, columns = height // SIDE, width // SIDE
        crops = canvas.reshape(3, rows, SIDE, columns, SIDE).permute(1, 3, 0, 2, 4).flatten(0, 1)
        np.testing.assert_array_equal(ours[1:], crops)
        whole = torch.nn.functional.interpolate(canvas[None], (SIDE, SIDE), mode="bicubic")
        np.testing.assert_allclose(ours[0], whole[0], atol=2e-5)


@pytest.mark.parametrize(("name", "settings"), [
    ("Kimi_K25Processor", {"size": {"max_height": 40, "max_width": 40}, "max_patches": 300}),
    ("KimiVLProcessor", {"in_token_limit": 300, "pad_input": True, "image_mean": HALF, "image_std": HALF}),
])  # fmt: skip
def test_kimi(torchvision: None, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]) -> None:
    """Kimi-VL, of which transformers has no processor, cuts as Kimi-K2.5 does where no side is too long."""
    from transformers.image_utils import SizeDict

    theirs = processor_of(monkeypatch, "kimi_k25", "Kimi_K25ImageProcessor")

    def pad(images: Any, pad_size: Any) -> Any:
        height, width = images.shape[-2:]
        return functional.pad(images, (0, pad_size.width - width, 0, pad_size.height - height))

    monkeypatch.setattr(theirs, "pad", pad, raising=False)
    family = make_family(name, ProcessorFiles(parts={"image": settings}))
    side = 40 if "size" in settings else 512
    for size in (*SIZES, (14, 14), (5, 9), (700, 30)):
        image = picture(*size)
        expected = theirs._preprocess(
            images=[tensor_of(image)], patch_size=14, merge_size=2, max_patches=300, disable_grouping=True,
            size=SizeDict(max_height=side, max_width=side), **COMMON,
        )  # fmt: skip
        item = family.process("image", image, {}, 1)
        np.testing.assert_array_equal(item.arrays["image_grid_thw"], expected["image_grid_thw"], err_msg=str(size))
        assert item.arrays["pixel_values"].shape == tuple(expected["pixel_values"].shape)
        near(item.arrays["pixel_values"], expected["pixel_values"], most=3.01)
        assert item.num_vectors == int(expected["image_grid_thw"].prod()) // 4
        assert item.text == "<|media_pad|>" * item.num_vectors
    if name == "KimiVLProcessor":
        with pytest.raises(InputError, match="more than 511 patches of 14 along a side"):
            family.process("image", picture(512 * 14, 3), {}, 1)


WIDE = 84
MOLMO_SIZES = (*SIZES, (1, 1), (8, 700), (700, 8), (14, 300), (15, 15), (28, 28), (378, 378))


def molmo_levels(images: torch.Tensor, *settings: Any) -> torch.Tensor:
    """As torchvision normalises bytes; mean and deviation as transformers scales them."""
    mean = torch.tensor(HALF)[:, None, None] * (1.0 / (1 / 255))
    return images.float().sub_(mean).div_(mean)


def same_but_ties(ours: Any, theirs: Any, what: Any, step: float = 1 / 127.5) -> None:
    """torch itself rounds differently with one thread and with several, and so has other bytes next to halves."""
    differs = ours != np.asarray(theirs)
    assert ours.shape == tuple(theirs.shape) and differs.mean() <= 0.005, what
    np.testing.assert_allclose(ours, theirs, atol=1.01 * step, err_msg=str(what))


@pytest.mark.parametrize("pool", [[2, 2], [3, 3], [3, 2]])
@pytest.mark.parametrize(("margins", "most"), [([1, 1], 8), ([2, 1], 5), ([0, 0], 3), ([4, 2], 12)])
def test_images_of_molmo_2_equal(
    torchvision: None, monkeypatch: pytest.MonkeyPatch, pool: list[int], margins: list[int], most: int
) -> None:
    from transformers.image_utils import SizeDict

    theirs = processor_of(monkeypatch, "molmo2", "Molmo2ImageProcessor", "bilinear")
    monkeypatch.setattr(type(theirs), "rescale_and_normalize", staticmethod(molmo_levels))
    settings = {"patch_size": 7, "pooling_size": pool, "overlap_margins": margins, "max_crops": most}
    part = {**settings, "size": {"height": WIDE, "width": WIDE}}
    family = make_family("Molmo2Processor", ProcessorFiles(parts={"image": part}))
    several = [picture(*size) for size in MOLMO_SIZES]
    for size, image in zip(MOLMO_SIZES, several, strict=True):
        want = theirs._preprocess(
            images=[tensor_of(image)], size=SizeDict(height=WIDE, width=WIDE), do_convert_rgb=True,
            disable_grouping=True, **settings, **COMMON | {"resample": 2},
        )  # fmt: skip
        item = family.process("image", image, {}, 1)
        same_but_ties(item.arrays["pixel_values"], want["pixel_values"], size)
        for name in ("image_token_pooling", "image_grids"):
            np.testing.assert_array_equal(item.arrays[name], want[name], err_msg=f"{name} of {size}")
        written = molmo_writer()
        assert item.text == written.replace_image_token(written, want, 0)
        assert item.num_vectors == item.text.count("<")
        tall, wide, rows, columns = want["image_grids"][0].tolist()
        assert item.text.count("<im_patch>") == tall * wide + rows * columns == len(want["image_token_pooling"])


def molmo_writer(**over: Any) -> Any:
    """What transformers' processor is where it writes an item."""
    from transformers.models.molmo2.processing_molmo2 import Molmo2Processor

    flags = dict(image_use_col_tokens=True, use_single_crop_col_tokens=None, use_single_crop_start_token=True,
                 video_use_col_tokens=False, use_frame_special_tokens=True)  # fmt: skip
    methods = {name: getattr(Molmo2Processor, name) for name in ("replace_image_token", "replace_video_token")}
    me = SimpleNamespace(**flags | over, **methods, video_processor=SimpleNamespace(max_fps=2))
    me.get_video_string = Molmo2Processor.get_video_string.__get__(me)
    return me


@pytest.mark.parametrize("own", [
    {}, {"image_use_col_tokens": False}, {"use_single_crop_col_tokens": False, "use_single_crop_start_token": False},
    {"video_use_col_tokens": True, "use_frame_special_tokens": False},
])  # fmt: skip
@pytest.mark.parametrize("num", [1, 4])
def test_videos_of_molmo_2_equal(
    torchvision: None, monkeypatch: pytest.MonkeyPatch, num: int, own: dict[str, bool]
) -> None:
    from transformers.image_utils import SizeDict
    from transformers.video_utils import VideoMetadata

    theirs = processor_of(monkeypatch, "molmo2", "Molmo2VideoProcessor", "bilinear", "video")
    monkeypatch.setattr(type(theirs), "rescale_and_normalize", staticmethod(molmo_levels))
    part = {"patch_size": 7, "pooling_size": [3, 3], "size": {"height": WIDE, "width": WIDE}}
    image = {**part, "pooling_size": [2, 2]}
    family = make_family("Molmo2Processor", ProcessorFiles(processor=own, parts={"video": part, "image": image}))
    frames = [picture(90, 61).rotate(90 * turn) for turn in range(num)]
    want = theirs._preprocess(
        videos=[torch.stack([tensor_of(frame) for frame in frames])], patch_size=7, pooling_size=[3, 3],
        size=SizeDict(height=WIDE, width=WIDE), **{k: v for k, v in COMMON.items() if k != "do_resize"},
    )  # fmt: skip
    indices = [round(7.3 * index) for index in range(num)]
    writer = molmo_writer(**own)
    for fps in (12.5, None):
        item = family.process("video", Video(frames, indices, fps, 100), {}, 1)
        same_but_ties(item.arrays["pixel_values_videos"], want["pixel_values_videos"], num)
        for name in ("video_token_pooling", "video_grids"):
            np.testing.assert_array_equal(item.arrays[name], want[name], err_msg=name)
        known = VideoMetadata(total_num_frames=100, fps=fps, frames_indices=indices)
        written = writer.replace_video_token(writer, {**want, "video_metadata": [known]}, 0)
        assert item.text == written and item.num_vectors == item.text.count("<")
    still = family.process("image", picture(90, 61), {}, 1)
    grids = {"image_grids": torch.from_numpy(still.arrays["image_grids"])}
    assert still.text == writer.replace_image_token(writer, grids, 0) and still.num_vectors == still.text.count("<")


@pytest.mark.parametrize(("name", "value", "message"), [
    ("size", {"height": 56, "width": 63}, "must be a square"), ("size", {"height": 8400, "width": 8400}, "4096"),
    ("max_crops", 65, "from 1 to 64"), ("max_crops", 1 << 40, "from 1 to 64"),
    ("overlap_margins", [4, 4], "leave nothing of a crop of 8"), ("overlap_margins", [-1, 1], "from 0 to"),
    ("overlap_margins", 3, "two whole numbers"), ("pooling_size", [0, 2], "from 1 to 64"),
    ("pooling_size", [1 << 30, 2], "from 1 to 64"), ("resample", 3, "resample = 3 is not built"),
    ("patch_size", 9, "in patches of 9"),
])  # fmt: skip
def test_settings_of_molmo_2_are_bounded(name: str, value: Any, message: str) -> None:
    part = {"size": {"height": SIDE, "width": SIDE}, "patch_size": 7, "overlap_margins": [1, 1]}
    family = make_family("Molmo2Processor", ProcessorFiles(parts={"image": part}))
    with pytest.raises(InputError, match=message):
        family.process("image", picture(64, 48), {name: value}, 1)


def test_a_video_of_molmo_2_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", str(3 * 378 * 378))
    family, frame = make_family("Molmo2Processor", ProcessorFiles()), picture(8, 8)
    assert family.process("video", Video([frame] * 3, [0, 1, 2], 1.0, 3), {}, 1).num_vectors == 3 * (81 + 2)
    with pytest.raises(InputError, match="4 frames of 378x378 pixels have 571536 pixels together; the limit is 428652"):
        family.process("video", Video([frame] * 4, [0, 1, 2, 3], 1.0, 4), {}, 1)


def test_bytes_between_pixels_equal_torch() -> None:
    """Exactly, where shares are halves, quarters, eighths: nothing is rounded before the end."""
    rng = np.random.default_rng(0)
    exact = (((20, 31), (40, 62)), ((40, 64), (20, 16)), ((31, 17), (124, 136)), ((9, 9), (9, 9)), ((1, 1), (5, 300)))
    others = (((20, 31), (70, 90)), ((277, 4), (659, 592)), ((618, 552), (378, 378)), ((5, 90), (1, 1)))
    for shape, size in (*exact, *others):
        levels = rng.integers(0, 256, (3, *shape), np.uint8)
        want = resize(torch.from_numpy(levels).float(), list(size), antialias=False).round().clamp(0, 255).numpy()
        ours = pixels.sampled_bytes(levels, size)
        if (shape, size) in exact:
            np.testing.assert_array_equal(ours, want)
        same_but_ties(ours, want, size, 1.0)


def test_numbers_between_pixels_equal_torch() -> None:
    rng = np.random.default_rng(0)
    for shape, size in (((3, 20, 31), (7, 9)), ((3, 8, 8), (13, 8)), ((3, 112, 56), (56, 56))):
        levels = rng.standard_normal(shape).astype(np.float32)
        want = resize(torch.from_numpy(levels), list(size), "bicubic", antialias=False)
        np.testing.assert_allclose(pixels.sampled(levels, size), want.numpy(), atol=2e-5)


@pytest.mark.parametrize("num", [400, 559, 560, 16_000, 20_123])
def test_filter_banks_of_phi_4(num: int) -> None:
    samples = (np.sin(np.arange(num) / 7) + np.random.default_rng(1).standard_normal(num) / 9).astype(np.float32)
    expected = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=16_000)
    item = make_family("Phi4MultimodalProcessor", ProcessorFiles()).process("audio", Audio(samples, 16_000), {}, 1)
    np.testing.assert_allclose(item.arrays["audio_input_features"], expected["audio_input_features"], atol=2e-4)
    assert item.arrays["audio_embed_sizes"].tolist() == [item.num_vectors] == expected["audio_embed_sizes"].tolist()


def test_audio_shorter_than_a_window_is_refused() -> None:
    family = make_family("Phi4MultimodalProcessor", ProcessorFiles())
    with pytest.raises(InputError, match="399 samples at 16000 Hz; the model needs 400"):
        family.process("audio", Audio(np.zeros(399, np.float32), 16_000), {}, 1)
