"""What some requests bring beside their tokens: vectors in place of embeddings, positions of several channels, and
ranges of positions that attend to each other in both directions.

Owns all of it by request, for as long as it has a row. In: which of its positions take vectors, and the key of those,
whose vectors (of encoded media or given embeddings, on the device that computes) somebody else keeps; channels of
positions (M-RoPE), on the host. Out: the part of them that a step reads. Where no request brings any, nothing is
looked up. Must not know: who made them, models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.layers.batch import BothWays


class StepVectors(NamedTuple):
    """Of one step, before it is sent."""

    places: np.ndarray  # [G] int64: where in the step
    vectors: Tensor  # [G, width]


class _Channels(NamedTuple):
    known: np.ndarray  # [C, n] of the first n positions
    shift: int  # what later positions are moved by, in every channel


class _PlacedVectors(NamedTuple):
    positions: np.ndarray  # [n] rising
    key: str  # of the [n, width] vectors that stand there


class _RowRanges(NamedTuple):
    ranges: Sequence[tuple[int, int]]
    past_window: bool
    are_joined: bool


class RowExtras:
    def __init__(self, encoded: Mapping[str, Tensor]) -> None:
        """`encoded`: vectors by key, of every item whose positions a step computes."""
        self._encoded = encoded
        self._places: dict[str, list[_PlacedVectors]] = {}  # by request
        self._channels: dict[str, _Channels] = {}
        self._both_ways: dict[str, _RowRanges] = {}

    def __bool__(self) -> bool:
        return bool(self._places or self._channels or self._both_ways)

    def place(self, request_id: str, positions: np.ndarray, key: str) -> None:
        """The vectors of this key stand at these positions, in place of token embeddings."""
        self._places.setdefault(request_id, []).append(_PlacedVectors(positions, key))

    def keys_of(self, request_id: str) -> list[str]:
        return [placed.key for placed in self._places.get(request_id, ())]

    def set_channels(self, request_id: str, known: np.ndarray, shift: int) -> None:
        """Channels [C, n] of the first n positions; every channel of a later position p is p + shift."""
        have = {len(channels.known) for name, channels in self._channels.items() if name != request_id}
        if have - {len(known)}:
            raise RuntimeError(f"request {request_id!r} has {len(known)} channels of positions, others {have.pop()}")
        self._channels[request_id] = _Channels(known, shift)

    def set_both_ways(
        self, request_id: str, ranges: Sequence[tuple[int, int]], *, past_window: bool = False,
        are_joined: bool = False,
    ) -> None:  # fmt: skip
        """[first, last) of positions that attend to each other in both directions; `past_window`: whatever the
        window of a layer is; `are_joined`: those of one range to those of the others, too."""
        self._both_ways[request_id] = _RowRanges(ranges, past_window, are_joined)

    def forget(self, request_id: str) -> None:
        self.forget_vectors(request_id)
        self._both_ways.pop(request_id, None)
        self._channels.pop(request_id, None)

    def forget_vectors(self, request_id: str) -> None:
        self._places.pop(request_id, None)

    def vectors_of(self, names: Sequence[str], starts: np.ndarray, counts: np.ndarray) -> StepVectors | None:
        """Of rows in the order of a step; None: these tokens have none."""
        places, vectors, first = [], [], 0
        for name, start, count in zip(names, starts.tolist(), counts.tolist(), strict=True):
            for positions, key in self._places.get(name, ()):
                low, high = np.searchsorted(positions, (start, start + count))
                if low < high:
                    places.append(positions[low:high] + (first - start))
                    vectors.append(self._encoded[key][low:high])
            first += count
        if not places:
            return None
        return StepVectors(np.concatenate(places), vectors[0] if len(vectors) == 1 else torch.cat(vectors))

    def both_ways_of(self, names: Sequence[str], starts: np.ndarray, counts: np.ndarray) -> tuple[BothWays, ...]:
        """Ranges with positions in this step."""
        if not self._both_ways:
            return ()
        ranges = []
        for entry, (name, start, count) in enumerate(zip(names, starts.tolist(), counts.tolist(), strict=True)):
            own = self._both_ways.get(name)
            for index, (first, last) in enumerate(() if own is None else own.ranges):
                if own is not None and first < start + count and start < last:
                    later = tuple(own.ranges[index + 1 :]) if own.are_joined else ()
                    end = later[-1][1] if later else last
                    if start + count < end:
                        raise RuntimeError(f"a plan cuts positions {first} to {end - 1} of request {name!r}")
                    ranges.append(BothWays(entry, first, last, own.past_window, later))
        return tuple(ranges)

    def channels_of(self, names: Sequence[str], counts: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """[C, T] of all tokens of a step; None: none of these rows has any. Rows without channels: their positions."""
        if not any(name in self._channels for name in names):
            return None
        number = len(next(iter(self._channels.values())).known)
        out = np.tile(positions, (number, 1))
        for name, end, count in zip(names, np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            if (own := self._channels.get(name)) is not None:
                here = slice(end - count, end)
                places = positions[here]
                is_known = places < own.known.shape[1]
                out[:, here] = places + own.shift
                out[:, here][:, is_known] = own.known[:, places[is_known]]
        return out
