"""Families that lay an image on a canvas of tiles, the one that changes its size least, and see it as a whole besides:
Llama 4, which keeps its proportions, and Cohere2 Vision (Command A Vision), which does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import (
    BICUBIC,
    BILINEAR,
    BY_SIZE,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    EmbedsLayout,
    Family,
    ProcessedItem,
)
from quire.media.images import check_crops
from quire.media.pixels import Array, Levels, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
}  # fmt: skip
_MOST_TILES = 64
_MOST_SIDE = 4096


def grids_of(most: int) -> list[Size]:
    """(rows, columns) of canvases with at most so many tiles."""
    return [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]


def _square_side(settings: Settings) -> int:
    height, width = settings.box("size")
    if height != width or height > _MOST_SIDE:
        raise InputError(f"size must be a square of up to {_MOST_SIDE} pixels, got {height}x{width}", param="size")
    return height


def _tiles(large: Array, image: Image, side: int, filter_: int) -> list[Array]:
    """Row by row, then the whole if there are several."""
    tiles = pixels.tiles(large, (side, side))
    return tiles if len(tiles) == 1 else [*tiles, pixels.planes(pixels.resize(image, (side, side), filter_))]


@dataclass(frozen=True)
class HalfLevels(Levels):
    """Each step is rounded to bfloat16, as Llama 4 was trained with."""

    def apply(self, array: Array) -> Array:
        import numpy as np  # lazy

        if self.scale is None or self.mean is None or self.std is None:
            return super().apply(array)
        table = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(self.scale))
        mean, std = (_bfloat16(np.array(values, np.float32)) for values in (self.mean, self.std))
        rows = [_bfloat16(_bfloat16(table - mean[channel]) / std[channel]) for channel in range(3)]
        return np.stack([rows[channel][array[..., channel, :, :]] for channel in range(3)], -3)


def _bfloat16(numbers: Array) -> Array:
    """The nearest, of two the even one."""
    import numpy as np  # lazy

    bits = numbers.astype(np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


class Llama4(Family):
    """Black fills a canvas below and to the right."""

    placeholders = {"image": "<|image|>"}
    features = {"image": "<|patch|>"}
    beside_embeds = BY_SIZE
    fixed = ("size", "do_resize")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = files.vision.get("image_size") or 336
        defaults = {
            **_STEPS, "size": {"height": side, "width": side}, "resample": BILINEAR, "image_mean": HALF,
            "image_std": HALF, "max_patches": 16, "resize_to_max_canvas": False,
        }  # fmt: skip
        self.image = self.settings("image", defaults)
        vision = {"patch_size": 14, "pixel_shuffle_ratio": 0.5, **{k: v for k, v in files.vision.items() if v}}
        own = self.processor({name: vision[name] for name in ("patch_size", "pixel_shuffle_ratio")})
        self.patch = own.whole("patch_size", high=_MOST_SIDE)
        ratio = own.number("pixel_shuffle_ratio", 0.5)
        if not 1 / 64 <= ratio <= 1:
            raise InputError(f"pixel_shuffle_ratio is {ratio!r:.60}; it is from 1/64 to 1", param="pixel_shuffle_ratio")
        self.shuffled = round(1 / ratio**2)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        if not settings.flag("do_resize", True):
            raise InputError("do_resize=False: images of this model lie on a canvas of tiles", param="do_resize")
        side, filter_ = _square_side(settings), settings.filter(BILINEAR)
        is_largest = settings.flag("resize_to_max_canvas")
        size = value.height, value.width
        rows, columns = self._grid(size, settings)
        target = rows * side, columns * side
        check_crops([(side, side)] * (rows * columns + 1), "max_patches")
        within = target
        if not is_largest:
            within = min(max(size[0], side), target[0]), min(max(size[1], side), target[1])
        small = pixels.planes(pixels.resize(value, _shrunk(size, within), filter_))
        large = np.zeros((3, *target), np.uint8)
        large[:, : small.shape[1], : small.shape[2]] = small
        tiles = _tiles(large, value, side, filter_)
        levels = settings.levels()
        array = HalfLevels(levels.scale, levels.mean, levels.std).apply(np.stack(tiles))
        text, num, _ = self._layout((rows, columns), side)
        return ProcessedItem({"pixel_values": array}, text, num)

    def _grid(self, size: Size, settings: Settings) -> Size:
        most, is_largest = settings.whole("max_patches", high=_MOST_TILES), settings.flag("resize_to_max_canvas")
        return llama4_grid(size, _square_side(settings), most, is_largest)

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        settings = self.image.over(options)
        return self._layout(self._grid(size, settings), _square_side(settings))

    def _layout(self, grid: Size, side: int) -> EmbedsLayout:
        num, tiles = (side // self.patch) ** 2 // self.shuffled, math.prod(grid)
        return EmbedsLayout(_llama4_text(*grid, num), num * (tiles if tiles == 1 else tiles + 1), {})


def llama4_grid(size: Size, side: int, most: int, is_largest: bool) -> Size:
    """(rows, columns) of the canvas on which the image is enlarged least (or most), or else shrunk least; of several
    the one with the fewest tiles."""
    import numpy as np  # lazy

    grids = grids_of(most)
    edges = np.array(grids, np.float32) * np.float32(side)
    scales = (edges / np.array(size, np.float32)).min(axis=1)
    larger = scales[scales >= 1]
    chosen = scales.max() if not len(larger) else larger.max() if is_largest else larger.min()
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen), key=math.prod)


def _shrunk(size: Size, within: Size) -> Size:
    height, width = size
    by_width, by_height = within[1] / width, within[0] / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), within[0])), within[1]
    return within[0], max(1, min(math.floor(width * by_height), within[1]))


def _llama4_text(rows: int, columns: int, num: int) -> str:
    tile = "<|patch|>" * num
    line = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    return f"<|image_start|>{line * rows if rows * columns > 1 else ''}<|image|>{tile}<|image_end|>"


class Cohere2Vision(Family):
    placeholders = {"image": "<|IMG_PATCH|>"}
    fixed = ("size", "do_resize")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = files.vision.get("image_size") or 512
        defaults = {
            **_STEPS, "size": {"height": side, "width": side}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD, "crop_to_patches": True, "min_patches": 1, "max_patches": 12, "patch_size": 16,
        }  # fmt: skip
        self.image = self.settings("image", defaults)
        self.num = self.image.whole("patch_size", high=256) ** 2  # the side of a tile in vectors

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        side, filter_ = _square_side(settings), settings.filter(BICUBIC)
        rows = columns = 1
        most = settings.whole("max_patches", high=_MOST_TILES)
        if settings.flag("crop_to_patches", True):
            rows, columns = cohere_grid((value.height, value.width), side, most)
        check_crops([(side, side)] * (rows * columns + 1), "max_patches")
        large = pixels.planes(pixels.resize(value, (rows * side, columns * side), filter_))
        tiles = _tiles(large, value, side, filter_)
        array = replace(settings.levels(), is_fused=True).apply(np.stack(tiles))
        num = self.num * len(tiles)
        return ProcessedItem({"pixel_values": array}, self.embeds_text(modality, num), num)

    def embeds_text(self, modality: str, num: int) -> str:
        if num % self.num:
            raise InputError(f"image embeddings have {num} vectors; this model has {self.num} per tile")
        line = self.placeholders["image"] * self.num + "<|IMG_LINE_BREAK|>"
        return f"<|START_OF_IMG|>{line * (num // self.num)}<|END_OF_IMG|>"


def cohere_grid(size: Size, side: int, most: int) -> Size:
    """(rows, columns) of the canvas on which no side of the image is shrunk and one is enlarged least; if there is
    none, of the one on which it is shrunk least. Of equals, the first by number of tiles, then by columns."""
    grids = sorted(grids_of(most), key=lambda grid: (math.prod(grid), grid[1]))
    scales = [min(rows * side / size[0], columns * side / size[1]) for rows, columns in grids]
    larger = [scale for scale in scales if scale >= 1]
    return grids[scales.index(min(larger) if larger else max(scales))]
