"""Molmo 2: an image whole and in crops that overlap, of which patches are pooled; frames of a video whole.

Every token of an item gets a vector, marks of rows and ends too: all of them attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BILINEAR, HALF, FamilyByModality, ProcessedItem
from quire.media.images import check_crops, check_frames
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.video import Video

_STEPS = {
    "size": {"height": 378, "width": 378}, "resample": BILINEAR, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": HALF, "image_std": HALF, "do_convert_rgb": True,
    "patch_size": 14,
}  # fmt: skip
_PATCH, _COLUMN = "<im_patch>", "<im_col>"
_MARKS = (_COLUMN, "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>")
_MOST_CROPS = 64
_MOST_SIDE = 4096


class Molmo2(FamilyByModality):
    placeholders = {"image": "<|image|>", "video": "<|video|>"}
    features = {"image": _PATCH, "video": _PATCH}
    marks = {"image": _MARKS, "video": _MARKS}
    most_items = {"video": 1}
    mixes_modalities = False
    fixed = ("size", "overlap_margins", "pooling_size")
    tells_tokens = True
    begins_text = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        crops = {"max_crops": 8, "overlap_margins": [4, 4], "pooling_size": [2, 2]}
        self.image = self.settings("image", {**_STEPS, **crops})
        self.video = self.settings("video", {**_STEPS, "pooling_size": [3, 3], "max_fps": 2}, "num_frames", "fps")
        own = self.processor({
            "image_use_col_tokens": True, "use_single_crop_start_token": True, "video_use_col_tokens": False,
            "use_frame_special_tokens": True,
        })  # fmt: skip
        self.ends_rows = own.flag("image_use_col_tokens")
        self.ends_rows_of_whole = own.flag("use_single_crop_col_tokens", self.ends_rows)
        self.ends_rows_of_frames = own.flag("video_use_col_tokens")
        self.whole_start = "<low_res_im_start>" if own.flag("use_single_crop_start_token") else "<im_start>"
        self.frame_ends = ("<frame_start>", "<frame_end>")
        if not own.flag("use_frame_special_tokens"):
            self.frame_ends = ("<im_start>", "<im_end>")

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image, "video": self._video}

    def _image(self, image: Image, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        side, patch = _geometry(settings)
        each, pool = side // patch, _two(settings, "pooling_size", 1, 64)
        margins = _two(settings, "overlap_margins", 0, _MOST_SIDE)
        if sum(margins) >= each:
            raise InputError(
                f"overlap_margins of {margins[0]} and {margins[1]} patches leave nothing of a crop of {each}",
                param="overlap_margins",
            )
        most = settings.whole("max_crops", high=_MOST_CROPS)
        rows, columns = tiling_of(
            (image.height, image.width), (each - sum(margins)) * patch, sum(margins) * patch, most
        )
        check_crops([(side, side)] * (1 + rows * columns), "max_crops")
        planes = pixels.planes(image)
        crops = [pixels.sampled_bytes(planes, (side, side)), *_crops(planes, (rows, columns), side, margins, patch)]
        pooled, whole = _pooled(np.arange(each * each).reshape(each, each), pool)
        parts, grid = _pooled(_overlapped((rows, columns), each, margins), pool)
        arrays = {
            "pixel_values": _patches(np.stack(crops), patch, settings),
            "image_token_pooling": np.concatenate([pooled, np.where(parts < 0, -1, parts + each * each)]),
            "image_grids": np.array([[*whole, *grid]], np.int64),
        }
        text = _grid_text(whole, (self.whole_start, "<im_end>"), self.ends_rows_of_whole)
        text += _grid_text(grid, ("<im_start>", "<im_end>"), self.ends_rows)
        num = _grid_size(whole, self.ends_rows_of_whole) + _grid_size(grid, self.ends_rows)
        return ProcessedItem(arrays, text, num)

    def _video(self, video: Video, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        side, patch = _geometry(settings)
        check_frames([(side, side)] * len(video.frames))
        each, pool, num = side // patch, _two(settings, "pooling_size", 1, 64), len(video.frames)
        frames = np.stack([pixels.sampled_bytes(pixels.planes(frame), (side, side)) for frame in video.frames])
        pooled, grid = _pooled(np.arange(each * each).reshape(each, each), pool)
        firsts = np.arange(num)[:, None, None] * (each * each)
        arrays = {
            "pixel_values_videos": _patches(frames, patch, settings),
            "video_token_pooling": np.where(pooled < 0, -1, pooled + firsts).reshape(-1, pooled.shape[-1]),
            "video_grids": np.array([[num, *grid]], np.int64),
        }
        fps = video.fps or settings.number("max_fps", 2)
        frame = _grid_text(grid, self.frame_ends, self.ends_rows_of_frames)
        text = " ".join(f"{index / fps:.1f} {frame}" for index in video.indices)
        return ProcessedItem(arrays, text, num * _grid_size(grid, self.ends_rows_of_frames))


def tiling_of(size: Size, window: int, margin: int, most: int) -> Size:
    """(rows, columns) of crops, as many as `most`: of those that need not shrink the image, where it grows least; else
    where it shrinks least. In float32, as released; an image that is narrower than the margins has a side below 0."""
    import numpy as np  # lazy

    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    inner = np.array(size, np.float32) - np.float32(margin)
    with np.errstate(divide="ignore"):
        scales = (np.array(grids, np.float32) * np.float32(window) / inner).min(-1)
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]


def _geometry(settings: Settings) -> tuple[int, int]:
    """Pixels of a crop's side, and of a patch's."""
    if settings.filter(BILINEAR) != BILINEAR:
        raise InputError(f"resample = {settings.get('resample')} is not built for this model, only {BILINEAR}",
                         param="resample")  # fmt: skip
    (height, width), patch = settings.box("size"), settings.whole("patch_size", high=1024)
    if height != width or height > _MOST_SIDE or height % patch:
        raise InputError(
            f"size must be a square of at most {_MOST_SIDE} pixels a side, in patches of {patch}; got {height}x{width}",
            param="size",
        )
    return height, patch


def _two(settings: Settings, name: str, low: int, high: int) -> tuple[int, int]:
    value = settings.get(name)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InputError(f"{name} must be two whole numbers, got {value!r:.100}", param=name)
    first, second = (Settings({name: part}).whole(name, low=low, high=high) for part in value)
    return first, second


def _crops(planes: Array, grid: Size, side: int, margins: Size, patch: int) -> list[Array]:
    step, margin = side - sum(margins) * patch, sum(margins) * patch
    canvas = pixels.sampled_bytes(planes, (grid[0] * step + margin, grid[1] * step + margin))
    return [
        canvas[:, top * step : top * step + side, left * step : left * step + side]
        for top in range(grid[0])
        for left in range(grid[1])
    ]


def _overlapped(grid: Size, each: int, margins: Size) -> Array:
    """Numbers of the patches that make up the whole, [rows, columns]: of patches in two crops, those of the crop in
    which they lie further from the edge."""
    import numpy as np  # lazy

    def kept(num: int) -> tuple[Array, Array]:
        spans = [(margins[0] if i else 0, each - (margins[1] if i < num - 1 else 0)) for i in range(num)]
        crops = np.concatenate([np.full(last - first, i) for i, (first, last) in enumerate(spans)])
        return crops, np.concatenate([np.arange(first, last) for first, last in spans])

    (top, row), (left, column) = kept(grid[0]), kept(grid[1])
    crop = top[:, None] * grid[1] + left[None]
    numbers: Array = crop * each * each + row[:, None] * each + column[None]
    return numbers


def _pooled(numbers: Array, pool: Size) -> tuple[Array, Size]:
    """Patches of each window [windows, patches of one], -1 where it juts out; and rows and columns of windows."""
    import numpy as np  # lazy

    tall, wide = (-size % step for size, step in zip(numbers.shape, pool, strict=True))
    edges = ((tall // 2, tall - tall // 2), (wide // 2, wide - wide // 2))
    filled = np.pad(numbers, edges, constant_values=-1)
    rows, columns = filled.shape[0] // pool[0], filled.shape[1] // pool[1]
    windows = filled.reshape(rows, pool[0], columns, pool[1]).transpose(0, 2, 1, 3)
    return windows.reshape(rows * columns, pool[0] * pool[1]).astype(np.int64), (rows, columns)


def _patches(crops: Array, patch: int, settings: Settings) -> Array:
    """(crops, channels, side, side) of bytes -> (crops, patches, numbers), channels last."""
    import numpy as np  # lazy

    levels = replace(settings.levels(), is_fused=True).apply(crops)
    num, channels, side, _ = levels.shape
    split = levels.reshape(num, channels, side // patch, patch, side // patch, patch).transpose(0, 2, 4, 3, 5, 1)
    return np.ascontiguousarray(split.reshape(num, (side // patch) ** 2, patch * patch * channels))


def _grid_text(grid: Size, ends: tuple[str, str], ends_rows: bool) -> str:
    row = _PATCH * grid[1] + (_COLUMN if ends_rows else "")
    return f"{ends[0]}{row * grid[0]}{ends[1]}"


def _grid_size(grid: Size, ends_rows: bool) -> int:
    return grid[0] * (grid[1] + ends_rows) + 2
