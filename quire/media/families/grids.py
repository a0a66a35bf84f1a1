"""Families that lay an image on a grid of tiles and see it as a whole besides: Ovis2, DeepSeek-OCR 2, Perception LM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, Family, ProcessedItem
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
    "resample": BICUBIC,
}  # fmt: skip
_MOST_TILES = 64
_COVERED = 0.9  # of an image: enough


class Ovis2(Family):
    """The whole image, then its tiles if there are several. Marks around and between them get vectors too."""

    placeholders = {"image": "<image>"}
    features = {"image": "<IMG_ATOM>"}
    marks = {"image": ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")}
    fixed = ("size",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        defaults = {
            **_STEPS, "size": {"height": 384, "width": 384}, "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
            "crop_to_patches": False, "min_patches": 1, "max_patches": 12, "use_covering_area_grid": True,
        }  # fmt: skip
        self.image = self.settings("image", defaults)
        self.num = self.processor({"image_seq_length": 256}).whole("image_seq_length", high=1 << 16)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        tiles, rows, columns = self._tiles(value, settings)
        arrays = {
            "pixel_values": settings.levels().apply(np.stack(tiles)),
            "grids": np.array([[rows, columns]], np.int64),
        }
        text = self._text(rows, columns)
        num_marks = 3 if rows * columns == 1 else 2 + rows * columns
        return ProcessedItem(arrays, text, self.num * len(tiles) + num_marks)

    def _tiles(self, image: Image, settings: Settings) -> tuple[list[Array], int, int]:
        size, filter_ = settings.box("size"), settings.filter(BICUBIC)
        most = settings.whole("max_patches", high=_MOST_TILES)
        whole = pixels.planes(pixels.resize(image, size, filter_))
        if not settings.flag("crop_to_patches") or most == 1:
            return [whole], 1, 1
        if settings.flag("use_covering_area_grid", True):
            columns, rows = covering_grid((image.height, image.width), size[0], most)
        else:
            fewest = settings.whole("min_patches", high=most)
            columns, rows = pixels.grid_of((image.height, image.width), size, fewest, most)
        if columns * rows == 1:
            return [whole], 1, 1
        large = pixels.planes(pixels.resize(image, (rows * size[0], columns * size[1]), filter_))
        return [whole, *pixels.tiles(large, size)], rows, columns

    def _text(self, rows: int, columns: int) -> str:
        start, grid, column, row, end = self.marks["image"]
        tile = self.features["image"] * self.num
        lines = row.join([column.join([tile] * columns)] * rows) if rows * columns > 1 else ""
        return f"{start}{tile}{grid}{lines}{end}"


def covering_grid(size: Size, side: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the fewest tiles that keep nine tenths of the image, if each is shrunk to fit its longer edge
    into `side`; else of those that keep most. As released, a grid is measured with its sides exchanged."""
    height, width = size
    enough, best = [], []
    for first in range(1, most + 1):
        for second in range(1, most // first + 1):
            covered = _covered(size, first, second, side) / (width * height)
            best.append((-covered, first * second, first, second))
            if covered > _COVERED:
                enough.append((first * second, -covered, first, second))
    *_, columns, rows = min(enough) if enough else min(best)
    return int(columns), int(rows)


def _covered(size: Size, rows: int, columns: int, side: int) -> float:
    """Pixels that are left."""
    height, width = size
    tall, wide = height // rows, width // columns
    total = 0.0
    for row in range(rows):
        edge = tall if row < rows - 1 else height - row * tall
        for column in range(columns):
            other = wide if column < columns - 1 else width - column * wide
            long, short = max(edge, other), float(min(edge, other))
            total += side * (short / long * side) if long > side else long * short
    return total


class DeepseekOcr2(Family):
    """Tiles, if the image is larger than one, then the whole on a grey square, then one vector that ends both."""

    placeholders = {"image": "<image>"}
    embeds_by_count = ("image",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        defaults = {
            **_STEPS, "size": {"height": 1024, "width": 1024}, "tile_size": 768, "image_mean": HALF, "image_std": HALF,
            "crop_to_patches": True, "min_patches": 2, "max_patches": 6, "background_color": [127, 127, 127],
        }  # fmt: skip
        self.image = self.settings("image", defaults)
        own = self.processor({"patch_size": 16, "downsample_ratio": 4})
        self.patch = own.whole("patch_size", high=1024) * own.whole("downsample_ratio", high=64)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        side, filter_ = settings.whole("tile_size", high=4096), settings.filter(BICUBIC)
        crops, levels = settings.flag("crop_to_patches", True), settings.levels()
        tiles = self._tiles(value, settings, side) if crops and max(value.size) > side else []
        whole = settings.box("size")[0] if crops else side
        scale = whole / max(value.size)
        size = max(1, round(value.height * scale)), max(1, round(value.width * scale))
        square = pixels.square(pixels.planes(pixels.resize(value, size, filter_)), _colour(settings))
        arrays = {
            "pixel_values": levels.apply(square[None]),
            "num_local_patches": np.array([len(tiles)], np.int64),
        }
        if tiles:
            arrays["pixel_values_local"] = levels.apply(np.stack(tiles))
        num = math.ceil(square.shape[-1] / self.patch) ** 2 + math.ceil(side / self.patch) ** 2 * len(tiles) + 1
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _tiles(self, image: Image, settings: Settings, side: int) -> list[Array]:
        most = settings.whole("max_patches", high=_MOST_TILES)
        fewest = settings.whole("min_patches", high=most)
        columns, rows = pixels.grid_of((image.height, image.width), (side, side), fewest, most)
        large = pixels.resize(image, (rows * side, columns * side), settings.filter(BICUBIC))
        return pixels.tiles(pixels.planes(large), (side, side))


def _colour(settings: Settings) -> list[int]:
    colour = settings.get("background_color")
    if not isinstance(colour, (list, tuple)) or len(colour) != 3 or not all(one in range(256) for one in colour):
        raise InputError(f"background_color must be three bytes, got {colour!r:.100}", param="background_color")
    return list(colour)


class PerceptionLM(Family):
    """A thumbnail and a grid of tiles of one size."""

    placeholders = {"image": "<|image|>", "video": "<|video|>"}
    embeds_by_count = ("image", "video")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        steps = {**_STEPS, "image_mean": HALF, "image_std": HALF}
        self.image = self.settings(
            "image", {**steps, "vision_input_type": "thumb+tile", "tile_size": 448, "max_num_tiles": 36}, "size"
        )
        self.video = self.settings("video", {**steps, "size": {"height": 448, "width": 448}}, "num_frames", "fps")
        args = files.vision.get("model_args")
        patch = args.get("patch_size") if isinstance(args, Mapping) else None
        own = self.processor({"patch_size": patch or 14, "pooling_ratio": 2})
        self.patch = own.whole("patch_size", high=1024) * own.whole("pooling_ratio", high=64)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality == "video":
            settings, name = self.video.over(options), "pixel_values_videos"
            size, filter_ = settings.box("size"), settings.filter(BICUBIC)
            parts = pixels.resized_frames(value.frames, size, filter_)
        elif modality == "image":
            settings, name = self.image.over(options), "pixel_values"
            parts = self._tiles(value, settings)
        else:
            raise self.refuse(modality)
        array = settings.levels().apply(np.stack(parts))
        height, width = array.shape[-2:]
        num = height // self.patch * (width // self.patch) * len(parts)
        return ProcessedItem({name: array[None]}, self.placeholders[modality] * num, num)

    def _tiles(self, image: Image, settings: Settings) -> list[Array]:
        side, filter_ = settings.whole("tile_size", high=4096), settings.filter(BICUBIC)
        thumbnail = pixels.planes(pixels.resize(image, (side, side), filter_))
        if settings.get("vision_input_type", "thumb+tile") != "thumb+tile":
            return [thumbnail]
        most = settings.whole("max_num_tiles", high=_MOST_TILES)
        columns, rows = canvas_of((image.height, image.width), side, most) if most > 1 else (1, 1)
        large = pixels.planes(pixels.resize(image, (rows * side, columns * side), filter_))
        return [thumbnail, *pixels.tiles(large, (side, side))]


def canvas_of(size: Size, side: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles that the image fits into, where it can be enlarged most; if it fits into none, of those
    with the nearest proportions that are not wider (an upright image: not narrower), the most."""
    height, width = size
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for number in range(most, 0, -1):
        for columns in range(1, number + 1):
            if number % columns == 0:
                by_ratio.setdefault(columns / (number // columns), []).append((columns, number // columns))
    best, longest = None, -math.inf
    for columns, rows in (grid for grids in by_ratio.values() for grid in grids):
        if columns * side < width or rows * side < height:
            continue
        wide, tall = _enlarged(size, columns * side, rows * side)
        if best is None or (wide if width < height else tall) >= longest:
            best, longest = (columns, rows), wide if width < height else tall
    if best is not None:
        return best
    ratio = width / height
    if ratio >= 1:
        nearest = min((one for one in by_ratio if one <= ratio), key=lambda one: abs(one - ratio))
        return max(by_ratio[nearest], key=lambda grid: grid[0])
    above = [one for one in by_ratio if one > ratio]
    nearest = min(above, key=lambda one: abs(1 / one - 1 / ratio))
    return max(by_ratio[nearest], key=lambda grid: grid[1])


def _enlarged(size: Size, wide: int, tall: int) -> tuple[float, float]:
    """(width, height) of the image within a canvas."""
    height, width = size
    ratio, factor = width / height, min(wide / width, tall / height)
    if ratio > 1:
        return factor * width, math.floor(factor * width / ratio)
    return math.floor(factor * height * ratio), factor * height
