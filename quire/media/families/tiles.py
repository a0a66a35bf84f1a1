"""Families that cut an image into tiles of their tower's size: Idefics3 and SmolVLM, InternVL; and Pixtral, which cuts
none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import (
    BICUBIC,
    BY_SIZE,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LANCZOS,
    EmbedsLayout,
    Family,
    ProcessedItem,
)
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": HALF,
    "image_std": HALF,
    "do_convert_rgb": True,
}
_MOST_EDGE = 4096
_MOST_TILES = 256


class Idefics3(Family):
    placeholders = {"image": "<image>"}
    beside_embeds = BY_SIZE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.numbers("vision_config")
        side = vision.whole("image_size", 364, high=_MOST_EDGE)
        defaults = {
            **_STEPS, "size": {"longest_edge": 4 * side}, "resample": LANCZOS, "do_image_splitting": True,
            "do_pad": True,            "max_image_size": {"longest_edge": side},
        }  # fmt: skip
        self.image = self.settings("image", defaults, "video_sampling")
        patch, scale = vision.whole("patch_size", 14, high=side), files.numbers().whole("scale_factor", 2, high=64)
        own = self.processor({"image_seq_len": (side // patch) ** 2 // scale**2})
        self.num = own.whole("image_seq_len", high=1 << 16)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        tiles, rows, columns = self._tiles(value, settings)
        array = settings.levels().apply(np.stack(tiles))
        mask = np.ones((len(tiles), *array.shape[-2:]), np.int64)
        arrays = {"pixel_values": array[None], "pixel_attention_mask": mask[None]}
        return ProcessedItem(arrays, self._text(rows, columns), self.num * len(tiles))

    def _tiles(self, image: Image, settings: Settings) -> tuple[list[Array], int, int]:
        filter_ = settings.filter(LANCZOS)
        steps, rows, columns = self._steps((image.height, image.width), settings)
        for size in steps:
            image = pixels.resize(image, size, filter_)
        if not rows:
            return [pixels.planes(image)], 0, 0
        side = self._side(settings)
        tiles = pixels.tiles(pixels.planes(image), (side, side))
        return [*tiles, pixels.planes(pixels.resize(image, (side, side), filter_))], rows, columns

    def _side(self, settings: Settings) -> int:
        return settings.edges("max_image_size").get("longest_edge", 364)

    def _steps(self, size: Size, settings: Settings) -> tuple[list[Size], int, int]:
        """What an image of this size is resized to, one after another, and how many rows and columns of tiles it has
        then; none if it is left whole."""
        side, steps = self._side(settings), list[Size]()
        if settings.flag("do_resize", True):
            longest = settings.edges("size").get("longest_edge")
            size = _scaled(size, longest) if longest else settings.box("size")
            steps.append(size)
        if not settings.flag("do_image_splitting", True):
            return [*steps, (side, side)], 0, 0
        size = _multiples(size, side)
        steps.append(size)
        return (steps, 0, 0) if max(size) <= side else (steps, size[0] // side, size[1] // side)

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        _, rows, columns = self._steps(size, self.image.over(options))
        return EmbedsLayout(self._text(rows, columns), self.num * (rows * columns + 1), {})

    def _text(self, rows: int, columns: int) -> str:
        around, token = "<fake_token_around_image>", self.placeholders["image"] * self.num
        whole = f"{around}<global-img>{token}{around}"
        if not rows:
            return whole
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{token}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return f"{''.join(lines)}\n{whole}"


def _scaled(size: Size, longest: int) -> Size:
    """The longer side becomes `longest`, the other an even number."""
    height, width = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MOST_EDGE:
        height, width = int(_MOST_EDGE / ratio), _MOST_EDGE
    elif height > width and height > _MOST_EDGE:
        height, width = _MOST_EDGE, int(_MOST_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _multiples(size: Size, side: int) -> Size:
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side


class InternVL(Family):
    placeholders = {"image": "<IMG_CONTEXT>", "video": "<video>"}
    features = {"video": "<IMG_CONTEXT>"}
    fixed = ("size",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = _first(files.vision.get("image_size"), 448)
        patch = _first(files.vision.get("patch_size"), 14)
        defaults = {
            **_STEPS, "size": {"height": side, "width": side}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD, "crop_to_patches": True, "min_patches": 1, "max_patches": 12,
        }  # fmt: skip
        self.image = Settings({**self.settings("image", defaults).values, "crop_to_patches": True})
        self.video = self.settings("video", defaults, "num_frames", "fps")
        scale = files.numbers().number("downsample_ratio", 0.5, high=1)
        own = self.processor({"image_seq_length": int((side // patch) ** 2 * scale**2)})
        self.num = own.whole("image_seq_length", high=1 << 16)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality == "video":
            settings = self.video.over(options)
            size, filter_ = settings.box("size"), settings.filter(BICUBIC)
            parts = pixels.resized_frames(value.frames, size, filter_)
            text = self._video_text(len(parts))
        elif modality == "image":
            settings = self.image.over(options)
            parts = self._tiles(value, settings)
            text = self.embeds_text("image", self.num * len(parts))
        else:
            raise self.refuse(modality)
        array = settings.levels().apply(np.stack(parts))
        return ProcessedItem({"pixel_values": array}, text, self.num * len(parts))

    def _video_text(self, num: int) -> str:
        token = self.feature("video")
        return "\n".join(f"Frame{number + 1}: <img>{token * self.num}</img>" for number in range(num))

    def embeds_text(self, modality: str, num: int) -> str:
        if modality == "image":
            return f"<img>{self.feature('image') * num}</img>"
        if num % self.num:
            raise InputError(f"video embeddings have {num} vectors; this model has {self.num} per frame")
        return self._video_text(num // self.num)

    def _tiles(self, image: Image, settings: Settings) -> list[Array]:
        size, filter_ = settings.box("size"), settings.filter(BICUBIC)
        most = settings.whole("max_patches", high=_MOST_TILES)
        whole = pixels.planes(pixels.resize(image, size, filter_))
        if not settings.flag("crop_to_patches", True) or most == 1:
            return [whole]
        fewest = settings.whole("min_patches", high=most)
        columns, rows = pixels.grid_of((image.height, image.width), size, fewest, most)
        large = pixels.planes(pixels.resize(image, (rows * size[0], columns * size[1]), filter_))
        tiles = pixels.tiles(large, size)
        return tiles if len(tiles) == 1 else [*tiles, whole]


class QianfanOCR(InternVL):
    placeholders = {"image": "<image>"}
    features = {"image": "<IMG_CONTEXT>"}


def _first(value: Any, default: int) -> int:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


class Pixtral(Family):
    """An image at its own size up to a limit, row by row, with a token at the end of each row and of the image."""

    placeholders = {"image": "[IMG]"}
    beside_embeds = BY_SIZE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        longest = files.vision.get("image_size") or 1024
        patch = files.vision.get("patch_size") or 16
        defaults = {
            **_STEPS, "size": {"longest_edge": longest}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD, "do_pad": True,
        }  # fmt: skip
        self.image = self.settings("image", defaults, "patch_size")
        own = self.processor({"patch_size": patch, "spatial_merge_size": files.config.get("spatial_merge_size") or 1})
        self.patch = own.whole("patch_size", high=1024) * own.whole("spatial_merge_size", high=64)
        self.ends = str(own.get("image_break_token", "[IMG_BREAK]")), str(own.get("image_end_token", "[IMG_END]"))

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        size = _within((value.height, value.width), settings, self.patch)
        array = settings.levels().apply(pixels.planes(pixels.resize(value, size, settings.filter(BICUBIC))))
        text, num, _ = self._layout(size)
        arrays = {"pixel_values": array[None], "image_sizes": np.array([size], np.int64)}
        return ProcessedItem(arrays, text, num)

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        return self._layout(_within(size, self.image.over(options), self.patch))

    def _layout(self, size: Size) -> EmbedsLayout:
        rows, columns = size[0] // self.patch, size[1] // self.patch
        line = self.placeholders["image"] * columns
        return EmbedsLayout((line + self.ends[0]) * (rows - 1) + line + self.ends[1], rows * columns, {})


def _within(size: Size, settings: Settings, patch: int) -> Size:
    height, width = size
    edges = settings.edges("size")
    most = (edges["longest_edge"],) * 2 if "longest_edge" in edges else settings.box("size")
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return ((height - 1) // patch + 1) * patch, ((width - 1) // patch + 1) * patch
