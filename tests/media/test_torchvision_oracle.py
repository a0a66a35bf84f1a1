"""Families whose processors transformers has for torchvision only, which is not installed: their code runs over torch's
own resizing, which torchvision calls. Grids, crops, masks, counts are equal, pixels within two levels of Pillow's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
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
    tools.pad = lambda image, edges, fill: functional.pad(  # type: ignore[attr-defined]
        image, (edges[0], edges[2], edges[1], edges[3]), value=fill[0]
    )
    modules[names[-1]].functional = tools  # type: ignore[attr-defined]
    for name, module in {**modules, tools.__name__: tools}.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in ("phi4_multimodal", "perception_lm"):
        sys.modules.pop(f"transformers.models.{name}.image_processing_{name}", None)


def processor_of(monkeypatch: pytest.MonkeyPatch, name: str, cls: str) -> Any:
    kind = getattr(importlib.import_module(f"transformers.models.{name}.image_processing_{name}"), cls)

    class Processor(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            """Without the check that torchvision is installed."""

        def rescale_and_normalize(self, images: Any, *settings: Any) -> Any:
            return (images.float() / 255 - 0.5) / 0.5

    def resized(self: Any, image: Any, size: Any, resample: Any = None, antialias: bool = True, **more: Any) -> Any:
        return resize(image, [size.height, size.width], "bicubic", antialias)

    monkeypatch.setattr(kind.__mro__[1], "resize", resized, raising=False)
    return Processor()


COMMON: dict[str, Any] = dict(
    do_resize=True, resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=HALF,
    image_std=HALF, return_tensors=None,
)  # fmt: skip


def tensor_of(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


def near(ours: Any, theirs: Any) -> None:
    levels = np.abs(ours - np.asarray(theirs)) * 127.5
    assert levels.max() <= 2.01 and levels.mean() < 0.6


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
