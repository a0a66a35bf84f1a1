"""Media of a request as they cross packages: where an item stands in the prompt, its key, what its encoder reads.

An item has a range of prompt positions, of which those set in `takes_vector` get the encoder's vectors in order; the
others keep their token's embedding (separators, line ends). Prompt embeddings are items whose encoder is the identity.
"""

from __future__ import annotations

import msgspec

KEPT = "kept_vectors"  # the array of an item that has some of its encoder's vectors only: their numbers


class ArrayData(msgspec.Struct, frozen=True):
    """An array as bytes."""

    shape: tuple[int, ...]
    dtype: str  # a name of KVSpec, or int64, uint8
    data: bytes  # row-major, little-endian


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    modality: str  # "image", "video", "audio", or "embeds": of a prompt
    key: str  # of content and processing: equal keys mean equal vectors
    offset: int  # first prompt position of its range
    length: int  # positions of its range
    arrays: dict[
        str, ArrayData
    ] = {}  # what the encoder reads, by the names the model's encoder knows (pixel_values, ...)
    takes_vector: bytes = b""  # one byte a position, 1: gets a vector; empty: all do
