"""LLaVA: one square per image (1.5), or the image in tiles beside it whole (Next, OneVision)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, CLIP_MEAN, CLIP_STD, Family, ProcessedItem
from quire.media.images import check_crops, check_frames
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = {
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": BICUBIC,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "do_convert_rgb": True,
}
_MOST_CHOICES, _MOST_SIDE, MOST_VECTORS = 256, 16384, 1 << 16
_ANYRES = "anyres_max_"


def resized(image: Image, settings: Settings) -> Array:
    """Bytes after the steps that CLIP's processor takes."""
    if settings.flag("do_resize", True):
        image = pixels.resize(image, _scaled_size(image, settings), settings.filter(BICUBIC))
    array = pixels.planes(image)
    return pixels.centre_crop(array, settings.box("crop_size")) if settings.flag("do_center_crop") else array


def _scaled_size(image: Image, settings: Settings) -> Size:
    edges = settings.edges("size")
    if "height" in edges and "width" in edges:
        return edges["height"], edges["width"]
    if "longest_edge" in edges and "shortest_edge" in edges:
        return pixels.between_edges(image, edges["shortest_edge"], edges["longest_edge"])
    if "shortest_edge" in edges:
        return pixels.shortest_edge(image, edges["shortest_edge"])
    raise InputError(f"size of the media processor has none of its keys: {sorted(edges)}", param="size")


def size_after(image: Image, settings: Settings) -> Size:
    """What `resized` would make of it."""
    if settings.flag("do_center_crop"):
        return settings.box("crop_size")
    return _scaled_size(image, settings) if settings.flag("do_resize", True) else (image.height, image.width)


class ClipTokens:
    """How many vectors a square of the tower gives. A CLS vector is one more, which the default strategy drops."""

    def __init__(self, files: ProcessorFiles) -> None:
        config, vision, own = files.config, files.vision, files.processor
        self.patch = Settings.of({"patch_size": vision.get("patch_size")}, own).whole("patch_size", high=_MOST_SIDE)
        strategy = own.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
        has_class = "clip" in str(vision.get("model_type", "")) and "siglip" not in str(vision.get("model_type", ""))
        further = own.get("num_additional_image_tokens")
        name = "num_additional_image_tokens"
        self.further = int(has_class) if further is None else Settings(own).whole(name, low=0, high=MOST_VECTORS)
        self.fewer = int((strategy or "default") == "default")

    def of(self, height: int, width: int) -> int:
        return (height // self.patch) * (width // self.patch) + self.further - self.fewer


class Llava(Family):
    placeholders = {"image": "<image>"}
    embeds_by_count = ("image", "video")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        token = files.processor.get("image_token")
        if isinstance(token, str) and token:
            self.placeholders = {"image": token}
        self.tokens = ClipTokens(files)
        defaults = {**IMAGE, "do_pad": False, **tower_size(files)}
        self.image = self.settings("image", defaults, "pad_size")

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        if settings.flag("do_pad"):
            colour = [int(part * 255) for part in settings.get("image_mean", CLIP_MEAN)]
            value = _squared(value, colour)
        array = settings.levels().apply(resized(value, settings))
        num = self.tokens.of(*array.shape[-2:])
        return ProcessedItem({"pixel_values": array[None]}, self.placeholders["image"] * num, num)


def tower_size(files: ProcessorFiles, modality: str = "image") -> dict[str, Any]:
    """The tower's own size where no file of a processor says one."""
    side = files.vision.get("image_size")
    if files.parts.get(modality) or not isinstance(side, int):
        return {}
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _squared(image: Image, colour: list[int]) -> Image:
    import numpy as np  # lazy

    from quire.media.images import pillow  # lazy

    filled = pixels.square(pixels.planes(image), colour)
    result: Image = pillow().Image.fromarray(np.ascontiguousarray(np.moveaxis(filled, 0, -1)))
    return result


# ---- tiles ----------------------------------------------------------------------------------------------------------


def tiled(image: Image, choices: list[list[int]], whole: Size, tile: int, settings: Settings) -> list[Image]:
    """The image whole at `whole`, then its tiles."""
    import numpy as np  # lazy

    from quire.media.images import pillow  # lazy

    lib, filter_ = pillow(), settings.filter(BICUBIC)
    target = pixels.best_resolution((image.height, image.width), choices)
    inner = pixels.fitted((image.height, image.width), target)
    padded = pixels.pad_to(pixels.planes(pixels.resize(image, inner, filter_)), target)
    parts = [
        lib.Image.fromarray(np.ascontiguousarray(np.moveaxis(part, 0, -1)))
        for part in pixels.tiles(padded, (tile, tile))
    ]
    parts = [pixels.resize(image, whole, filter_), *parts]
    check_crops([size_after(part, settings) for part in parts], "image_grid_pinpoints")
    if settings.flag("do_resize", True):
        check_crops([_scaled_size(part, settings) for part in parts], "image_grid_pinpoints")
    return parts


def choices_of(settings: Settings, tile: int, *, whole_tiles: bool = False) -> list[list[int]]:
    """(height, width) of at least one tile. `whole_tiles`: and of no part of one, for which there are no features."""
    name, value = "image_grid_pinpoints", settings.get("image_grid_pinpoints")
    good = isinstance(value, (list, tuple)) and 0 < len(value) <= _MOST_CHOICES
    if not good or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value):
        raise InputError(
            f"{name} must be 1 to {_MOST_CHOICES} pairs of height and width, got {value!r:.100}", param=name
        )
    checked = [[Settings({name: side}).whole(name, high=_MOST_SIDE) for side in pair] for pair in value]
    for tall, wide in checked:
        is_cut = whole_tiles and (tall % tile or wide % tile)
        if is_cut or min(tall, wide) < tile or -(-tall // tile) * -(-wide // tile) > pixels.MOST_TILES:
            raise InputError(
                f"{name} has {tall}x{wide} pixels; expected 1 to {pixels.MOST_TILES} whole tiles of {tile}x{tile}",
                param=name,
            )
    return checked


def unpadded(size: Size, grid: int, target: Size, side: Size) -> Size:
    """(rows, columns) of features that are left of all tiles when what was padded is cut off."""
    rows, columns = grid * (target[0] // side[0]), grid * (target[1] // side[1])
    height, width = size
    if width / height > columns / rows:
        inner = int(round(height * (columns / width), 7))
        rows -= (rows - inner) // 2 * 2
    else:
        inner = int(round(width * (rows / height), 7))
        columns -= (columns - inner) // 2 * 2
    return rows, columns


def is_chosen(files: ProcessorFiles) -> bool:
    """The files say which resolutions there are."""
    own = files.parts.get("image", {}).get("image_grid_pinpoints")
    return own is not None or bool(files.config.get("image_grid_pinpoints"))


def _tile(settings: Settings) -> int:
    return (settings.box("crop_size") if "crop_size" in settings else settings.box("size"))[0]


class LlavaNext(Llava):
    fixed = ("size", "do_resize", "do_center_crop")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        pinpoints = files.config.get("image_grid_pinpoints") or [
            [336, 672],
            [672, 336],
            [672, 672],
            [1008, 336],
            [336, 1008],
        ]
        defaults = {**IMAGE, "do_pad": True, "image_grid_pinpoints": pinpoints, **tower_size(files)}
        self.image = self.settings("image", defaults)
        if is_chosen(files):
            choices_of(self.image, _tile(self.image), whole_tiles=True)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        whole, tile = settings.box("size"), _tile(settings)
        choices = choices_of(settings, tile)
        if self.tokens.patch > tile:
            raise InputError(
                f"patch_size is {self.tokens.patch}, more than a tile of {tile} pixels", param="patch_size"
            )
        parts = tiled(value, choices, whole, tile, settings)
        levels = settings.levels()
        array = np.stack([levels.apply(resized(part, settings)) for part in parts])
        side: Size = array.shape[-2], array.shape[-1]
        target = pixels.best_resolution((value.height, value.width), choices)
        rows, columns = unpadded((value.height, value.width), side[0] // self.tokens.patch, target, side)
        num = rows * columns + rows + self.tokens.of(*side)
        sizes = np.array([[value.height, value.width]], np.int64)
        arrays = {"pixel_values": array[None], "image_sizes": sizes}
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)


class LlavaOneVision(Family):
    """Of several images each is one square; a video's frames are squares whose features are pooled two by two."""

    placeholders = {"image": "<image>", "video": "<video>"}
    embeds_by_count = ("image", "video")
    few_items = 1
    fixed = ("size", "do_resize", "do_center_crop")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.numbers("vision_config")
        side = vision.whole("image_size", 384, high=_MOST_SIDE)
        defaults = {
            **IMAGE, "do_center_crop": None, "crop_size": None, "do_pad": True,
            "size": {"height": side, "width": side},
            "image_grid_pinpoints": files.config.get("image_grid_pinpoints") or _onevision_choices(),
        }  # fmt: skip
        self.image = self.settings("image", defaults)
        if is_chosen(files):
            choices_of(self.image, self.image.box("size")[0], whole_tiles=True)
        self.video = self.settings("video", {key: defaults[key] for key in (*IMAGE, "do_pad")}, "num_frames", "fps")
        own = self.processor({
            "num_image_tokens": (side // vision.whole("patch_size", 14, high=side)) ** 2,
            "vision_aspect_ratio": files.config.get("vision_aspect_ratio") or "anyres_max_9",
            "vision_feature_select_strategy": files.config.get("vision_feature_select_strategy") or "full",
        })  # fmt: skip
        self.num = own.whole("num_image_tokens", high=MOST_VECTORS)
        self.fewer = int(own.get("vision_feature_select_strategy") == "default")
        self.most = _most_squares(own)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality == "video":
            return self._video(value.frames, options)
        if modality != "image":
            raise self.refuse(modality)
        return self._image(value, options, count)

    def _image(self, image: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        is_alone = count == 1
        settings = self.image.over(options)
        whole = settings.box("size")
        choices = choices_of(settings, whole[0])
        parts = tiled(image, choices, whole, whole[0], settings) if is_alone else [image]
        levels = settings.levels()
        array = np.stack([levels.apply(resized(part, settings)) for part in parts])
        num = self._tiles((image.height, image.width), choices, whole) if is_alone else self.num + 1
        num -= self.fewer
        sizes = np.array([[image.height, image.width]], np.int64)
        counts = np.array([min(count, 2)], np.int64)
        arrays = {"pixel_values": array[None], "image_sizes": sizes, "batch_num_images": counts}
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _tiles(self, size: Size, choices: list[list[int]], side: Size) -> int:
        grid = int(math.sqrt(self.num))
        rows, columns = unpadded(size, grid, pixels.best_resolution(size, choices), side)
        ratio = math.sqrt(rows * columns / (self.most * grid**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + self.num

    def _video(self, frames: list[Image], options: Mapping[str, Any]) -> ProcessedItem:
        import numpy as np  # lazy

        settings = self.video.over(options)
        levels = settings.levels()
        check_resized(frames, settings)
        array = np.stack([levels.apply(resized(frame, settings)) for frame in frames])
        side = math.ceil(int(math.sqrt(self.num)) / 2)
        num = len(frames) * side * side + 1
        return ProcessedItem({"pixel_values_videos": array[None]}, self.placeholders["video"] * num, num)


def check_resized(frames: list[Image], settings: Settings) -> None:
    """Before anything is resized: of one size then, and not too large together, cropped or not yet."""
    sizes = [size_after(frame, settings) for frame in frames]
    check_frames(sizes)
    if len(several := sorted(set(sizes))) > 1:
        first, other = (f"{width}x{height}" for height, width in several[:2])
        raise InputError(
            f"the frames of the video have different sizes once they are resized: {first} and {other} pixels",
            param="multi_modal_data",
        )
    if settings.flag("do_resize", True):
        check_frames([_scaled_size(frame, settings) for frame in frames])


def _most_squares(settings: Settings) -> int:
    """As `anyres_max_9` says: features of more squares than nine are made fewer."""
    value = settings.get("vision_aspect_ratio")
    digits = value.removeprefix(_ANYRES) if isinstance(value, str) else ""
    if not digits.isdecimal() or len(digits) > 4 or not 1 <= int(digits) <= pixels.MOST_TILES:
        raise InputError(
            f"vision_aspect_ratio is {value!r:.60}; it must be {_ANYRES} and a number from 1 to {pixels.MOST_TILES}",
            param="vision_aspect_ratio",
        )
    return int(digits)


def _onevision_choices() -> list[list[int]]:
    return [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
