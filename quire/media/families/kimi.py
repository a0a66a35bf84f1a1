"""Kimi-VL and Kimi-K2.5: images at their own size up to a number of patches, black below and to the right up to whole
groups of patches that are merged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, Family, ProcessedItem
from quire.media.images import check_size
from quire.media.pixels import Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError, NotBuiltError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "do_resize": True,
    "resample": BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "patch_size": 14,
}
_MOST_PATCHES = 1 << 18


class KimiK25(Family):
    placeholders = {"image": "<|media_pad|>"}
    embeds_by_count = ("image",)
    begin = "<|media_begin|>"
    steps: Mapping[str, Any] = {
        **_STEPS, "size": {"max_height": 512, "max_width": 512}, "max_patches": 16384, "merge_size": 2,
        "image_mean": HALF, "image_std": HALF,
    }  # fmt: skip

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", self.steps)

    def written(self, modality: str, number: int) -> str:
        return f"{self.begin}image<|media_content|>{self.placeholders[modality]}<|media_end|>"

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        patch, merge = settings.whole("patch_size", high=1024), self._merge(settings)
        size = self._size((value.height, value.width), settings, patch)
        tall, wide = (-(-side // (patch * merge)) * patch * merge for side in size)
        check_size(wide, tall)
        bytes_ = np.zeros((1, 3, tall, wide), np.uint8)
        bytes_[0, :, : size[0], : size[1]] = pixels.planes(pixels.resize(value, size, settings.filter(BICUBIC)))
        flat, grid = pixels.patches(bytes_, patch, 1, 1)
        array = settings.levels().apply(flat.reshape(len(flat), 3, patch, patch))
        num = len(flat) // merge**2
        arrays = {"pixel_values": array, "image_grid_thw": np.array([grid], np.int64)}
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _merge(self, settings: Settings) -> int:
        return settings.whole("merge_size", high=64)

    def _size(self, size: Size, settings: Settings, patch: int) -> Size:
        """Never larger than the image."""
        if not settings.flag("do_resize", True):
            return size
        edges, (height, width) = settings.edges("size"), size
        side = edges.get("max_height")
        if side is None or side != edges.get("max_width"):
            raise InputError("size of the media processor must have max_height and max_width, which are equal")
        num = max(1, height // patch) * max(1, width // patch)
        most = settings.whole("max_patches", high=_MOST_PATCHES)
        scale = min(1.0, math.sqrt(most / num), side * patch / height, side * patch / width)
        longest = side * patch
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)


class KimiVL(KimiK25):
    begin = "<|media_start|>"
    steps = {
        **_STEPS, "in_token_limit": 4096, "merge_kernel_size": [2, 2], "pad_input": True, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }  # fmt: skip
    _LONGEST = 511  # patches of a side, for which there are positions

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        if not self.image.flag("pad_input", True):
            raise NotBuiltError("a processor of Kimi-VL with pad_input = false is not built", param="model")

    def _merge(self, settings: Settings) -> int:
        value = settings.get("merge_kernel_size")
        if not isinstance(value, list | tuple) or len(value) != 2 or value[0] != value[1]:
            raise InputError(f"merge_kernel_size of the media processor must be two equal numbers, got {value!r:.60}")
        return Settings({"merge_kernel_size": value[0]}).whole("merge_kernel_size", high=64)

    def _size(self, size: Size, settings: Settings, patch: int) -> Size:
        height, width = size
        num, most = (height // patch) * (width // patch), settings.whole("in_token_limit", high=_MOST_PATCHES)
        if num > most:
            scale = math.sqrt(most / num)
            height, width = max(1, int(height * scale)), max(1, int(width * scale))
        if max(height, width) // patch > self._LONGEST:
            raise InputError(
                f"an image of {width}x{height} pixels has more than {self._LONGEST} patches of {patch} along a side",
                param="multi_modal_data",
            )
        return height, width
