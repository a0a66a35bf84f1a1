"""Positions of several channels (M-RoPE): time, height and width of an item's vectors, one number for text.

In: the length of a prompt, its items and their grids. Out: channels of all positions, and what later positions are
moved by: an item moves on by the larger of its height and width, however many vectors it has. Must not know: tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHANNELS = 3


class VisionGrid(NamedTuple):
    """Vectors of an item, as they lie in time and space."""

    start: int  # first position
    shape: tuple[int, int, int]  # time, height, width, after merging
    interval: float = 1.0  # positions of the time channel between two frames
    numbers: np.ndarray | None = None  # of the vectors that the prompt has, in their order; None: all of them


def mrope(length: int, grids: Sequence[VisionGrid]) -> tuple[np.ndarray, int]:
    """[3, length] int64, and the shift of positions from `length` on. Grids are in the order of their positions."""
    known = np.empty((CHANNELS, length), np.int64)
    at = now = 0  # position in the prompt, and what the channels have come to
    for start, (frames, height, width), interval, numbers in grids:
        known[:, at:start] = np.arange(start - at) + now
        now += start - at
        end = start + (frames * height * width if numbers is None else len(numbers))
        if end > length:
            raise ValueError(f"an item of {frames} x {height} x {width} vectors has {end - start} from position "
                             f"{start} on, and the prompt {length} tokens")  # fmt: skip
        steps = (np.arange(frames) * interval).astype(np.int64)
        where = np.meshgrid(steps, np.arange(height), np.arange(width), indexing="ij")
        places = np.stack(where).reshape(CHANNELS, -1)
        known[:, start:end] = (places if numbers is None else places[:, numbers]) + now
        at, now = end, now + max(height, width)
    known[:, at:] = np.arange(length - at) + now
    return known, now - at
