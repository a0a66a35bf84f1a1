"""Arithmetic on pixels: sizes to resize to, crops, tiles, patches, and the table that turns bytes into normalised
floats.

The results equal those of transformers' image processors that use Pillow, to the last bit: they resize bytes with
Pillow, and what follows is a function of one byte and its channel. In: PIL images and numbers. Out: numpy arrays,
channels first. Must not know: which family wants what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.media.images import check_frames, check_size
from quire.schema.errors import InputError

MOST_TILES = 1024  # of one image

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Levels:
    """What a byte becomes: rescaled, then normalised, by channel."""

    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    is_fused: bool = False  # mean and deviation are scaled instead of the byte, as processors of torchvision do

    def apply(self, pixels: Array) -> Array:
        """(…, channels, height, width) of bytes -> float32."""
        import numpy as np  # lazy

        factor, scale = np.float32(1), 1.0 if self.scale is None else self.scale
        if self.is_fused and self.mean is not None:
            factor, scale = np.float32(1.0 / scale), 1.0
        levels = np.arange(256, dtype=np.float64) * scale
        table = np.repeat(levels.astype(np.float32)[None], 3, axis=0)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(values, np.float32)[:, None] * factor for values in (self.mean, self.std))
            table = (table - mean) / std
        out = np.empty(pixels.shape, np.float32)
        for channel in range(3):
            np.take(table[channel], pixels[..., channel, :, :], out=out[..., channel, :, :], mode="clip")
        return out


def planes(image: Image) -> Array:
    """Channels first."""
    import numpy as np  # lazy

    return np.moveaxis(np.asarray(image), -1, 0)


def resize(image: Image, size: Size, filter_: int) -> Image:
    height, width = size
    check_size(width, height)
    return image.resize((width, height), filter_)


def resized_frames(frames: Sequence[Image], size: Size, filter_: int) -> list[Array]:
    """Planes of each."""
    check_frames([size] * len(frames))
    return [planes(resize(frame, size, filter_)) for frame in frames]


def shortest_edge(image: Image, edge: int) -> Size:
    """The shorter side becomes `edge`."""
    height, width = image.height, image.width
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def between_edges(image: Image, shortest: int, longest: int) -> Size:
    """The shorter side becomes `shortest`, or less where the other would be longer than `longest`."""
    height, width = image.height, image.width
    small, large = float(min(height, width)), float(max(height, width))
    exact: float = shortest
    edge = shortest
    if large / small * shortest > longest:
        exact = longest * small / large
        edge = round(exact)
    if min(height, width) == edge:
        return height, width
    if width < height:
        return int(exact * height / width), edge
    return edge, int(exact * width / height)


def centre_crop(pixels: Array, size: Size) -> Array:
    """What lies outside the image is black."""
    import numpy as np  # lazy

    height, width = pixels.shape[-2:]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    if top >= 0 and left >= 0:
        return pixels[..., top : top + size[0], left : left + size[1]]
    check_size(*size)
    tall, wide = max(size[0], height), max(size[1], width)
    canvas = np.zeros((*pixels.shape[:-2], tall, wide), pixels.dtype)
    above, before = -(-(tall - height) // 2), -(-(wide - width) // 2)
    canvas[..., above : above + height, before : before + width] = pixels
    top, left = top + above, left + before
    return canvas[..., max(0, top) : min(tall, top + size[0]), max(0, left) : min(wide, left + size[1])]


def square(pixels: Array, colour: Sequence[int]) -> Array:
    """Filled up to a square, the image in the middle."""
    import numpy as np  # lazy

    channels, height, width = pixels.shape
    if height == width:
        return pixels
    side = max(height, width)
    check_size(side, side)
    canvas = np.empty((channels, side, side), pixels.dtype)
    canvas[:] = np.array(colour, pixels.dtype)[:, None, None]
    top, left = (side - height) // 2, (side - width) // 2
    canvas[:, top : top + height, left : left + width] = pixels
    return canvas


def sampled(levels: Array, size: Size) -> Array:
    """(…, height, width) of floats at another size, each a cubic function of the 16 nearest ones: what lies between is
    not averaged."""
    for axis, num in ((-2, size[0]), (-1, size[1])):
        levels = _cubic(levels, num, axis)
    return levels


def sampled_bytes(pixels: Array, size: Size) -> Array:
    """(channels, height, width) of bytes at another size, each the mean of the 4 nearest ones by distance: what lies
    between is not averaged. As torch interpolates floats, with one rounding for a product and the sum with another;
    then rounded to bytes."""
    import numpy as np  # lazy

    check_size(size[1], size[0])
    above, below, by_row = _nearest(pixels.shape[-2], size[0])
    left, right, by_column = _nearest(pixels.shape[-1], size[1])
    out = np.empty((*pixels.shape[:-2], *size), np.uint8)
    for plane, into in zip(pixels, out, strict=True):
        upper, lower = (_mixed(taken[:, left], taken[:, right], by_column) for taken in (plane[above], plane[below]))
        into[:] = np.clip(np.rint(_mixed(upper, lower, by_row[:, None])), 0, 255)
    return out


def _mixed(one: Array, other: Array, share: Array) -> Array:
    """float32 of both, the other with this share."""
    import numpy as np  # lazy

    rest = (np.float32(1) - share).astype(np.float64)
    mixed: Array = (one * rest + (other.astype(np.float32) * share)).astype(np.float32)
    return mixed


def _nearest(length: int, num: int) -> tuple[Array, Array, Array]:
    """Of `num` places along so many pixels: the pixels before and behind each, and how near it is to the latter."""
    import numpy as np  # lazy

    scale = np.float32(length) / np.float32(num)
    places = ((np.arange(num) + 0.5) * np.float64(scale) - 0.5).astype(np.float32)
    places = np.maximum(places, np.float32(0))
    first = np.minimum(places.astype(np.int64), length - 1)
    near = np.clip(places - first.astype(np.float32), 0, 1).astype(np.float32)
    return first, np.minimum(first + 1, length - 1), near


def _cubic(levels: Array, num: int, axis: int) -> Array:
    import numpy as np  # lazy

    length = levels.shape[axis]
    places = (np.arange(num, dtype=np.float32) + np.float32(0.5)) * np.float32(length / num) - np.float32(0.5)
    first = np.floor(places)
    out = np.zeros((*levels.shape[:axis], num, *levels.shape[axis:][1:]), np.float32)
    shape = (num, 1) if axis == -2 else (num,)
    for step in range(-1, 3):
        far = np.abs(places - first - np.float32(step))
        near = (1.25 * far - 2.25) * far * far + 1
        weight = np.where(far <= 1, near, ((-0.75 * far + 3.75) * far - 6) * far + 3).astype(np.float32)
        taken = np.take(levels, np.clip(first.astype(np.int64) + step, 0, length - 1), axis)
        out += taken * weight.reshape(shape)
    return out


# ---- tiles ----------------------------------------------------------------------------------------------------------


def best_resolution(size: Size, choices: Sequence[Sequence[int]]) -> Size:
    """Of the choices, the one that keeps most of the image; of equals, the smaller."""
    height, width = size
    best, most_used, wasted = (0, 0), -1, math.inf
    for tall, wide in choices:
        scale = min(wide / width, tall / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        rest = tall * wide - used
        if used > most_used or (used == most_used and rest < wasted):
            best, most_used, wasted = (tall, wide), used, rest
    return best


def fitted(size: Size, target: Size) -> Size:
    """The size within `target` with the same proportions."""
    height, width = size
    by_width, by_height = target[1] / width, target[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), target[0]), target[1]
    return target[0], min(math.ceil(width * by_height), target[1])


def pad_to(pixels: Array, target: Size) -> Array:
    """In the middle, black around; an odd remainder goes below and to the right."""
    import numpy as np  # lazy

    check_size(target[1], target[0])
    tall, wide = target[0] - pixels.shape[-2], target[1] - pixels.shape[-1]
    edges = ((0, 0), (tall // 2, tall - tall // 2), (wide // 2, wide - wide // 2))
    return np.pad(pixels, edges)


def tiles(pixels: Array, size: Size) -> list[Array]:
    """Row by row."""
    height, width = pixels.shape[-2:]
    if -(-height // size[0]) * -(-width // size[1]) > MOST_TILES:
        raise InputError(f"an image of more than {MOST_TILES} tiles", param="multi_modal_data")
    return [
        pixels[..., top : top + size[0], left : left + size[1]]
        for top in range(0, height, size[0])
        for left in range(0, width, size[1])
    ]


def grid_of(size: Size, tile: Size, fewest: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles whose proportions are nearest the image's; of equals the larger, unless it would have
    more than twice the image's pixels."""
    ratio, area = size[1] / size[0], size[0] * size[1]
    grids = [(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if fewest <= w * h <= most]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(ratio - columns / rows)
        if distance < nearest:
            best, nearest = (columns, rows), distance
        elif distance == nearest and area > 0.5 * tile[0] * tile[1] * columns * rows:
            best = (columns, rows)
    return best


# ---- patches --------------------------------------------------------------------------------------------------------


def at_least(size: Size, side: int) -> Size:
    """Enlarged, where one side is shorter than that."""
    if min(size) >= side:
        return size
    scale = max(side / size[0], side / size[1])
    return int(size[0] * scale), int(size[1] * scale)


def rounded_size(size: Size, factor: int, fewest: int, most: int, *, frames: int = 1, group: int = 1) -> Size:
    """Both sides multiples of `factor`, pixels between `fewest` and `most`, proportions nearly preserved. `frames` in
    groups of `group` count towards the pixels."""
    height, width = size
    if max(height, width) / min(height, width) > 200:
        raise InputError(f"an image of {width}x{height} pixels: one side may be 200 times the other at most")
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    depth = round(frames / group) * group if group > 1 else 1
    if depth * tall * wide > most:
        ratio = math.sqrt(frames * height * width / most)
        tall = max(factor, math.floor(height / ratio / factor) * factor)
        wide = max(factor, math.floor(width / ratio / factor) * factor)
    elif depth * tall * wide < fewest:
        ratio = math.sqrt(fewest / (frames * height * width))
        tall = math.ceil(height * ratio / factor) * factor
        wide = math.ceil(width * ratio / factor) * factor
    check_size(wide, tall)
    return tall, wide


def least_changed(frames: Array, side: int, depth: int, rate: float) -> Array:
    """Squares of a video's frames without those that change least: their numbers, frame by frame, row by row.

    (frames, channels, height, width) of bytes. A square has `side` pixels and `depth` frames and is compared with the
    one before it; those of the first frames are kept. Of all squares, `rate` are left out, or as many as may be."""
    import numpy as np  # lazy

    num, channels, height, width = frames.shape
    rows, columns, each = height // side, width // side, (height // side) * (width // side)
    changes = np.full((-(-num // depth), rows, columns), np.inf)
    for group in range(1, len(changes)):
        changes[group] = 0
        for frame in range(group * depth, (group + 1) * depth):
            ours, before = (frames[min(at, num - 1)].astype(np.int16) for at in (frame, frame - depth))
            squares = np.abs(ours - before).reshape(channels, rows, side, columns, side)
            changes[group] += squares.sum((0, 2, 4), dtype=np.int64)
    total = changes.size
    most = max(each, int(total * (1 - rate)))
    order = np.argsort(-changes.reshape(-1), kind="stable")
    return np.sort(order[:most]).astype(np.int64)


def patches(frames: Array, patch: int, merge: int, depth: int) -> tuple[Array, tuple[int, int, int]]:
    """(frames, channels, height, width) -> flat patches in the order of the merged grid, and the grid (t, h, w). The
    last frame is repeated up to a multiple of `depth`."""
    import numpy as np  # lazy

    if missing := -len(frames) % depth:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    num, channels, height, width = frames.shape
    t, h, w = num // depth, height // patch, width // patch
    split = frames.reshape(t, depth, channels, h // merge, merge, patch, w // merge, merge, patch)
    ordered = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(ordered.reshape(t * h * w, channels * depth * patch * patch)), (t, h, w)
