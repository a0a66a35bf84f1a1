"""DeepSeek-VL2: an image whole on a square, and on the canvas of tiles that keeps most of it; grey around both.
DeepSeek-OCR: an image whole on a square, and stretched over a grid of tiles if it is larger than one. DeepSeek-OCR 2 in
its own repository does so too, with vectors of another number."""

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
_MOST_CROPS = 64
_STEPS = {"image_mean": HALF, "image_std": HALF, "normalize": True, "patch_size": 14, "downsample_ratio": 2}


def _choices() -> list[list[int]]:
    """Of up to nine tiles."""
    sides = range(1, _MOST_TILES + 1)
    return [[wide * _SIDE, tall * _SIDE] for wide in sides for tall in sides if wide * tall <= _MOST_TILES]


class DeepseekVL2(Family):
    """The whole image row by row, a border, then the rows of the tiles. In prompts of more than two images there is
    one tile."""

    placeholders = {"image": "<image>"}
    embeds_by_count = ("image",)
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


class DeepseekOcr(Family):
    """The rows of the tiles, then the whole image row by row, then an end. Modes are settings: Tiny, Small, Base and
    Large have no crop_mode and a base_size and image_size of 512, 640, 1024 and 1280; Gundam is the default."""

    placeholders = {"image": "<image>"}
    embeds_by_count = ("image",)
    fixed = ("patch_size", "downsample_ratio")
    tile = 5 / 8  # of the side that the encoder is made for: a tile's
    most = 5 / 4  # the largest, because the encoder's attention grows with the fourth power

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.side = Settings(files.vision).whole("image_size", 1024, high=_MOST_SIDE)
        defaults = {
            **_STEPS, "patch_size": 16, "downsample_ratio": 4, "base_size": self.side,
            "image_size": int(self.side * self.tile), "crop_mode": True, "min_crops": 2, "max_crops": 6,
        }  # fmt: skip
        self.image = own_settings(defaults, files)
        self._own["image"] = self.image
        self.patch = self.image.whole("patch_size", high=self.side)
        self.ratio = self.image.whole("downsample_ratio", high=64)
        self.distorted = int(self.side * self.tile)  # a square up to this size is filled

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        base, side = (self._side(settings, name) for name in ("base_size", "image_size"))
        crops, levels, around = settings.flag("crop_mode", True), levels_of(settings), grey(settings)
        grid = rows, columns = self._grid(value, settings, side) if crops and max(value.size) > side else (1, 1)
        tiles = rows * columns if rows * columns > 1 else 0
        check_crops([(base, base), *[(side, side)] * tiles], "max_crops")
        if not crops and side <= self.distorted:
            whole = pixels.planes(pixels.resize(value, (base, base), BICUBIC))
        else:
            whole = padded(value, (base, base), around)
        parts = None
        if tiles:
            large = pixels.planes(pixels.resize(value, (rows * side, columns * side), BICUBIC))
            parts = levels.apply(np.stack(pixels.tiles(large, (side, side))))
        arrays, num = self._arrays(levels.apply(whole[None]), parts, grid)
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _arrays(self, whole: Array, tiles: Array | None, grid: Size) -> tuple[dict[str, Any], int]:
        """And how many vectors there are."""
        import numpy as np  # lazy

        rows, columns = grid
        arrays = {"pixel_values": whole, "images_spatial_crop": np.array([[columns, rows]], np.int64)}
        side = self._squares(whole.shape[-1])
        num = side * (side + 1) + 1
        if tiles is not None:
            arrays["images_crop"], side = tiles, self._squares(tiles.shape[-1])
            num += rows * side * (columns * side + 1)
        return arrays, num

    def _side(self, settings: Settings, name: str) -> int:
        return settings.whole(name, low=self.patch, high=int(self.side * self.most))

    def _squares(self, side: int) -> int:
        return math.ceil((side // self.patch) / self.ratio)

    def _grid(self, image: Image, settings: Settings, side: int) -> Size:
        most = settings.whole("max_crops", low=2, high=_MOST_CROPS)
        fewest = settings.whole("min_crops", high=most)
        columns, rows = pixels.grid_of((image.height, image.width), (side, side), fewest, most)
        return rows, columns


class DeepseekOCR2(DeepseekOcr):
    """One tile after another, then the whole image, then an end. The encoder has learned vectors for two sizes."""

    tile, most = 3 / 4, 1.0

    def _arrays(self, whole: Array, tiles: Array | None, grid: Size) -> tuple[dict[str, Any], int]:
        import numpy as np  # lazy

        arrays = {"pixel_values": whole, "num_local_patches": np.array([0 if tiles is None else len(tiles)], np.int64)}
        num = self._squares(whole.shape[-1]) ** 2 + 1
        if tiles is not None:
            arrays["pixel_values_local"] = tiles
            num += self._squares(tiles.shape[-1]) ** 2 * len(tiles)
        return arrays, num

    def _side(self, settings: Settings, name: str) -> int:
        side = super()._side(settings, name)
        if side not in (known := (self.distorted, self.side)):
            raise InputError(
                f"{name} is {side}; the encoder reads squares of {known[0]} or {known[1]} pixels", param=name
            )
        return side


_OCR = {"DeepseekOCRForCausalLM": DeepseekOcr, "DeepseekOCR2ForCausalLM": DeepseekOCR2}


def deepseek_family(files: ProcessorFiles) -> Family:
    """All have the same processor and the same type."""
    names = files.config.get("architectures")
    known = [_OCR[one] for one in names if isinstance(one, str) and one in _OCR] if isinstance(names, list) else []
    return known[0](files) if known else DeepseekVL2(files)


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
