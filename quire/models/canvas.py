"""Positions of several channels (M-RoPE) of MiniCPM-V 4.7: slices of an image lie beside each other on a canvas, over
which the image as a whole is stretched, and marks have places at their corners.

In: the ids of a prompt, the ids of marks, and where vectors of which grids stand. Out: channels of all positions, and
what later positions are moved by. Must not know: models, items.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from quire.models.mrope import CHANNELS

_BESIDE = 2  # tokens between two slices of a row: the marks of one's end and the other's start


class Crop(NamedTuple):
    """An image as a whole, or a slice of it."""

    start: int
    end: int
    height: int  # vectors
    width: int


class CanvasMarks(NamedTuple):
    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int


@dataclass
class Picture:
    """An image or a frame. Those with nothing but marks between them are of one `group`."""

    whole: Crop
    begins_group: bool
    slices: list[Crop] = field(default_factory=list)

    @property
    def last(self) -> int:
        return (self.slices or [self.whole])[-1].end

    def grid(self) -> tuple[int, int]:
        """(rows, columns) of slices: a row ends where more than marks of slices follow."""
        num = len(self.slices)
        steps = enumerate(itertools.pairwise(self.slices), 1)
        columns = next((at for at, (one, other) in steps if other.start - one.end > _BESIDE), num)
        return (num // columns, columns) if num % columns == 0 else (1, num)


def canvas(ids: Sequence[int], crops: Sequence[Crop], marks: CanvasMarks) -> tuple[np.ndarray, int]:
    """[3, length] int64, and the shift of positions behind. Crops are in the order of their positions."""
    length = len(ids)
    known = np.empty((CHANNELS, length), np.int64)
    at = now = 0  # position in the prompt, and what the channels have come to
    for picture in _pictures(ids, crops, marks):
        start = picture.whole.start - 1
        if picture.begins_group:
            known[:, at:start] = np.arange(start - at) + now
            now += start - at
        at = picture.last
        while at < length and ids[at] in marks:
            at += 1
        now = _draw(known, picture, at, now)
    known[:, at:] = np.arange(length - at) + now
    return known, int(known.max()) + 1 - length


def _pictures(ids: Sequence[int], crops: Sequence[Crop], marks: CanvasMarks) -> list[Picture]:
    pictures: list[Picture] = []
    before = 0
    for crop in crops:
        fits = crop.end - crop.start == crop.height * crop.width and min(crop.height, crop.width) > 0
        if crop.start < max(before, 1) or crop.end > len(ids) or not fits:
            raise ValueError(
                f"{crop.height} x {crop.width} vectors stand from position {crop.start} to {crop.end} of {len(ids)}, "
                f"behind position {before}; there must be a mark before them"
            )
        if pictures and ids[crop.start - 1] == marks.slice_start:
            pictures[-1].slices.append(crop)
        else:
            follows = bool(pictures) and all(one in marks for one in ids[before : crop.start - 1])
            pictures.append(Picture(crop, not follows))
        before = crop.end
    return pictures


def _draw(known: np.ndarray, picture: Picture, end: int, origin: int) -> int:
    """What follows begins there."""
    whole, slices = picture.whole, picture.slices
    rows, columns = picture.grid() if slices else (1, 1)
    height, width = slices[0][2:] if slices else whole[2:]
    tall, wide = rows * height, columns * width
    known[:, whole.start - 1 : end] = origin
    known[1:, whole.start - 1] = max(origin - 1, 0)
    if whole.end < end:
        known[1:, whole.end] = origin + tall, origin + wide
    _fill(known, whole, (_stretched(tall, whole.height), _stretched(wide, whole.width)), origin)
    for number, crop in enumerate(slices):
        top, left = number // columns * height, number % columns * width
        known[1:, crop.start - 1] = origin + top, origin + left
        if crop.end < end:
            known[1:, crop.end] = origin + top + crop.height - 1, origin + left + crop.width - 1
        _fill(known, crop, (top + np.arange(crop.height), left + np.arange(crop.width)), origin)
    for number, (one, other) in enumerate(itertools.pairwise(slices)):
        if other.start - one.end > _BESIDE:  # the end of a row
            places = slice(one.end + 1, other.start - 1)
            known[1, places] = origin + (number // columns + 1) * height - 1
            known[2, places] = origin + wide
    return origin + max(tall, wide) + 1


def _fill(known: np.ndarray, crop: Crop, places: tuple[np.ndarray, np.ndarray], origin: int) -> None:
    down, across = np.meshgrid(*places, indexing="ij")
    known[0, crop.start : crop.end] = origin
    known[1, crop.start : crop.end] = origin + down.reshape(-1)
    known[2, crop.start : crop.end] = origin + across.reshape(-1)


def _stretched(length: int, num: int) -> np.ndarray:
    """Places of `num` vectors along so many, rounded as torch does."""
    places: np.ndarray = torch.linspace(0, length - 1, num).round().long().numpy()
    return places
