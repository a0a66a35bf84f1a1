"""Which positions of a prompt take the vectors of a media item. Must not know: tensors, models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.schema.media import MediaItem


def places_of_vectors(item: MediaItem) -> np.ndarray:
    """Positions of the prompt, rising."""
    if not item.takes_vector:
        return np.arange(item.offset, item.offset + item.length)
    return item.offset + np.flatnonzero(np.frombuffer(item.takes_vector, np.uint8))


def runs_of_vectors(item: MediaItem) -> Iterator[tuple[int, int]]:
    """[first, last) of positions that follow each other and take vectors."""
    places = places_of_vectors(item)
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        yield int(run[0]), int(run[-1]) + 1
