"""LFM2-VL: an image at its own size up to a number of vectors; a larger one in square tiles, and smaller besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BILINEAR, BY_SIZE, HALF, EmbedsLayout, Family, ProcessedItem
from quire.media.images import check_crops
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_DEFAULTS = {
    "do_resize": True, "resample": BILINEAR, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": HALF, "image_std": HALF, "do_convert_rgb": True, "do_pad": True, "downsample_factor": 2,
    "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True, "min_image_tokens": 64,
    "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512, "max_pixels_tolerance": 2.0,
}  # fmt: skip
_MOST_TILES = 64
_MOST_TOKENS = 1 << 16


class Lfm2VL(Family):
    placeholders = {"image": "<image>"}
    beside_embeds = BY_SIZE
    fixed = ("encoder_patch_size", "downsample_factor", "tile_size", "do_resize", "do_pad")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", _DEFAULTS, "size", "max_num_patches", "return_row_col_info")
        self.is_marked = self.processor({"use_image_special_tokens": True}).flag("use_image_special_tokens", True)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        plan = _Plan(self.image.over(options))
        size = value.height, value.width
        whole = plan.whole_size(size)
        rows, columns = plan.grid(size)
        is_cut = rows * columns > 1
        tile, filter_ = (plan.tile, plan.tile), plan.settings.filter(BILINEAR)
        sizes = plan.sizes(size)
        check_crops(sizes, "max_tiles")
        check_crops([plan.padded] * len(sizes), "max_tiles, max_image_tokens")
        parts: list[Array] = []
        if is_cut:
            large = pixels.planes(pixels.resize(value, (rows * plan.tile, columns * plan.tile), filter_))
            parts = pixels.tiles(large, tile)
        if len(parts) < len(sizes):
            parts.append(pixels.planes(pixels.resize(value, whole, filter_)))
        levels = replace(plan.settings.levels(), is_fused=True)
        array = np.zeros((len(parts), plan.most_patches, 3 * plan.patch**2), np.float32)
        mask = np.zeros(array.shape[:2], np.int32)
        for index, part in enumerate(parts):
            flat = _patches(levels.apply(part), plan.patch)
            array[index, : len(flat)], mask[index, : len(flat)] = flat, 1
        shapes = np.array([(height // plan.patch, width // plan.patch) for height, width in sizes], np.int64)
        arrays = {"pixel_values": array, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        text, num, _ = self._layout(plan, size)
        return ProcessedItem(arrays, text, num)

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        return self._layout(_Plan(self.image.over(options)), size)

    def _layout(self, plan: _Plan, size: Size) -> EmbedsLayout:
        counts = [plan.num_vectors(one) for one in plan.sizes(size)]
        return EmbedsLayout(self._text(*plan.grid(size), counts), sum(counts), {})

    def _text(self, rows: int, columns: int, counts: list[int]) -> str:
        names = [""] if rows * columns == 1 else [
            *(f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)),
            "<|img_thumbnail|>",
        ]  # fmt: skip
        token = self.placeholders["image"]
        if not self.is_marked:
            return token * sum(counts)
        text = "".join(name + token * num for name, num in zip(names, counts, strict=False))
        return f"<|image_start|>{text}<|image_end|>"


def _patches(levels: Array, side: int) -> Array:
    """(channels, height, width) -> (patches, numbers of a patch), channels last."""
    channels, height, width = levels.shape
    split = levels.reshape(channels, height // side, side, width // side, side)
    flat: Array = split.transpose(1, 3, 2, 4, 0).reshape(-1, side * side * channels)
    return flat


class _Plan:
    """The settings, checked."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.patch = settings.whole("encoder_patch_size", high=1024)
        self.group = settings.whole("downsample_factor", high=64)
        self.tile = settings.whole("tile_size", high=4096)
        self.most_tokens = settings.whole("max_image_tokens", high=_MOST_TOKENS)
        self.fewest_tokens = settings.whole("min_image_tokens", high=self.most_tokens)
        self.has_thumbnail = settings.flag("use_thumbnail", True)
        self.is_split = settings.flag("do_image_splitting", True)
        self.most_tiles = settings.whole("max_tiles", high=_MOST_TILES)
        self.fewest_tiles = settings.whole("min_tiles", high=self.most_tiles)
        self.tolerance = settings.number("max_pixels_tolerance", 2.0)
        self.factor = self.patch * self.group
        if self.tile % self.patch:
            raise InputError(f"tile_size {self.tile} is not a multiple of {self.patch}", param="tile_size")
        tile_patches = (self.tile // self.patch) ** 2 if self.is_split else 0
        self.most_patches = max(self.most_tokens * self.group**2, tile_patches)

    @property
    def padded(self) -> Size:
        """A square of as many patches as each part is filled up to."""
        side = self.patch * math.ceil(math.sqrt(self.most_patches))
        return side, side

    def whole_size(self, size: Size) -> Size:
        """Multiples of what becomes one vector, so many of them."""
        factor, square = self.factor, self.factor**2
        height, width = size
        tall, wide = (max(factor, round(edge / factor) * factor) for edge in size)
        if tall * wide > self.most_tokens * square:
            ratio = math.sqrt(height * width / (self.most_tokens * square))
            tall, wide = (max(factor, math.floor(edge / ratio / factor) * factor) for edge in size)
        elif tall * wide < self.fewest_tokens * square:
            ratio = math.sqrt(self.fewest_tokens * square / (height * width))
            tall, wide = (math.ceil(edge * ratio / factor) * factor for edge in size)
        if tall * wide > self.most_patches * self.patch**2:
            raise InputError(
                f"an image of {width}x{height} pixels is too narrow: it would have more than {self.most_patches} "
                "patches",
                param="multi_modal_data",
            )
        return tall, wide

    def grid(self, size: Size) -> tuple[int, int]:
        """(rows, columns) of tiles; 1 and 1: it is not cut."""
        if not self.is_split or self.fewest_tiles == self.most_tiles == 1:
            return 1, 1
        tall, wide = (max(self.patch, round(edge / self.factor) * self.factor) for edge in size)
        if tall * wide <= self.most_tokens * self.factor**2 * self.tolerance:
            return 1, 1
        columns, rows = pixels.grid_of(size, (self.tile, self.tile), self.fewest_tiles, self.most_tiles)
        return rows, columns

    def sizes(self, size: Size) -> list[Size]:
        """Of the tiles, and of the image as a whole."""
        num = math.prod(self.grid(size))
        tiles = [(self.tile, self.tile)] * num if num > 1 else []
        return [*tiles, self.whole_size(size)] if not tiles or self.has_thumbnail else tiles

    def num_vectors(self, size: Size) -> int:
        return math.prod(-(-(edge // self.patch) // self.group) for edge in size)
