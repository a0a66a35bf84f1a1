"""DeepSeek-VL2: an image whole on a square, and on the canvas of tiles that keeps most of it; grey around both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, HALF, Family, ProcessedItem
from quire.media.images import check_crops, check_size
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 384
_MOST_SIDE = 4096
_MOST_CHOICES = 1024
_MOST_TILES = 9
_STEPS = {"image_mean": HALF, "image_std": HALF, "normalize": True, "patch_size": 14, "downsample_ratio": 2}


def _choices() -> list[list[int]]:
    """Of up to nine tiles."""
    sides = range(1, _MOST_TILES + 1)
    return [[wide * _SIDE, tall * _SIDE] for wide in sides for tall in sides if wide * tall <= _MOST_TILES]


class DeepseekVL2(Family):
    """The whole image row by row, a border, then the rows of the tiles. In prompts of more than two images there is
    one tile."""

    placeholders = {"image": "<image>"}
    few_items = 2
    fixed = ("candidate_resolutions", "patch_size", "downsample_ratio")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        choices = files.config.get("candidate_resolutions") or _choices()
        self.image = own_settings({**_STEPS, "candidate_resolutions": choices}, files)
        self._own["image"] = self.image
        self.side, self.choices = canvases(self.image)
        patch = self.image.whole("patch_size", high=self.side)
        self.num = math.ceil((self.side // patch) / self.image.whole("downsample_ratio", high=64))

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        size = (value.height, value.width)
        canvas = pixels.best_resolution(size, self.choices) if count <= self.few_items else (self.side, self.side)
        rows, columns = canvas[0] // self.side, canvas[1] // self.side
        check_crops([(self.side, self.side)] * (1 + rows * columns), "candidate_resolutions")
        levels, around = levels_of(settings), grey(settings)
        views = [padded(value, (self.side, self.side), around)]
        views += pixels.tiles(padded(value, canvas, around), (self.side, self.side))
        arrays = {
            "pixel_values": levels.apply(np.stack(views)),
            "images_spatial_crop": np.array([[columns, rows]], np.int64),
        }
        num = self.num * (self.num + 1) + 1 + rows * self.num * (columns * self.num + 1)
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)


def own_settings(defaults: Mapping[str, Any], files: ProcessorFiles) -> Settings:
    """These checkpoints have them in processor_config.json, beside settings of the tokenizer."""
    return Settings.of(defaults, {name: files.processor[name] for name in defaults if name in files.processor})


def canvases(settings: Settings) -> tuple[int, list[Size]]:
    """The side of a tile, and (height, width) of every canvas, which the files have the other way round."""
    value = settings.get("candidate_resolutions")
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MOST_CHOICES:
        raise InputError(
            f"candidate_resolutions of the media processor must be 1 to {_MOST_CHOICES} pairs, got {value!r:.100}",
            param="candidate_resolutions",
        )
    sizes = [_canvas(one) for one in value]
    side = sizes[0][1]
    for tall, wide in sizes:
        if tall % side or wide % side or tall // side * (wide // side) > pixels.MOST_TILES:
            raise InputError(
                f"candidate_resolutions of the media processor has {wide}x{tall} pixels; expected up to "
                f"{pixels.MOST_TILES} tiles of {side}x{side}",
                param="candidate_resolutions",
            )
    return side, sizes


def _canvas(value: Any) -> Size:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(
            f"candidate_resolutions of the media processor must be pairs of numbers, got {value!r:.60}",
            param="candidate_resolutions",
        )
    wide, tall = (
        Settings({"candidate_resolutions": edge}).whole("candidate_resolutions", high=_MOST_SIDE) for edge in value
    )
    return tall, wide


def levels_of(settings: Settings) -> pixels.Levels:
    return Settings({**settings.values, "do_normalize": settings.flag("normalize", True)}).levels()


def grey(settings: Settings) -> list[int]:
    """What lies around an image: the mean of all."""
    means = settings.get("image_mean")
    means = means if isinstance(means, list | tuple) else [means] * 3
    colour = [int(mean * 255) if isinstance(mean, int | float) and math.isfinite(mean) else -1 for mean in means]
    if len(colour) != 3 or not all(level in range(256) for level in colour):
        raise InputError(
            f"image_mean of the media processor must be three shares, got {means!r:.100}", param="image_mean"
        )
    return colour


def padded(image: Image, target: Size, colour: Sequence[int]) -> Array:
    """(3, height, width) of bytes: the image with its proportions in the middle of a canvas."""
    import numpy as np  # lazy

    tall, wide = target
    check_size(wide, tall)
    size, ratio, ours = target, image.width / image.height, wide / tall
    if ratio > ours:
        size = max(1, round(image.height / image.width * wide)), wide
    elif ratio < ours:
        size = tall, max(1, round(image.width / image.height * tall))
    canvas = np.empty((3, tall, wide), np.uint8)
    canvas[:] = np.array(colour, np.uint8)[:, None, None]
    above, before = round((tall - size[0]) * 0.5), round((wide - size[1]) * 0.5)
    part = canvas[:, above : above + size[0], before : before + size[1]]
    part[:] = pixels.planes(pixels.resize(image, size, BICUBIC))
    return canvas
