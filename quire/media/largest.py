"""The largest item of each modality that a prompt may have: what an encoder takes most memory for.

In: a family, its options, and how many vectors a prompt may have. Out: processed items of blank pictures and silence.
`limit_mm_per_prompt` may say how large items will be (`width`, `height`, `num_frames`, `length`); larger ones are still
accepted. Must not know: devices, who measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.base.log import logger
from quire.media.families.base import Family, ProcessedItem
from quire.media.inputs import DEFAULT_LIMIT, sent_arrays
from quire.schema.errors import QuireError
from quire.schema.media import MediaItem

log = logger(__name__)
_SIDE = 4096  # pixels of the first picture that is tried
_RATIOS = (0.75, 0.5, 1 / 3)  # of height and width: families with tiles have more of them for some
_CUT = 2048  # of those that are tried in other ratios: tiles are no more for larger ones
_SMALL = 64 << 20  # bytes of an item that is tried in other ratios too
_MOST = 512 << 20  # bytes of an item: those of all modalities travel to a worker in one message
_TRIES = 8
_FRAME = 720, 1280
_RATE = 16000
_SECONDS = 240


def largest_items(
    family: Family, modalities: tuple[str, ...], limits: Mapping[str, Any], settings: Mapping[str, Any],
    num_frames: int, max_vectors: int,
) -> list[MediaItem]:  # fmt: skip
    """One of each modality that prompts may have items of; none of those that cannot be processed."""
    items = []
    for modality in modalities:
        limit = limits.get(modality, DEFAULT_LIMIT)
        hints = limit if isinstance(limit, Mapping) else {"count": limit}
        if modality not in family.placeholders or not hints.get("count", DEFAULT_LIMIT):
            continue
        tries = {"image": _images, "video": _videos, "audio": _sounds}[modality](hints, num_frames)
        if (item := _largest(family, modality, tries, settings, max_vectors)) is not None:
            key, num = f"largest {modality}", item.num_vectors
            arrays = sent_arrays(item)
            items.append(MediaItem(modality=modality, key=key, offset=0, length=num, arrays=arrays))
    return items


def _largest(
    family: Family, modality: str, tries: Iterator[tuple[Any, list[Any]]], settings: Mapping[str, Any], most: int
) -> ProcessedItem | None:
    """Of the first that fits, or of the others of its size, the one with most vectors."""
    why = "none is small enough"
    for value, others in tries:
        best: ProcessedItem | None = None
        for one in (value, *others):
            try:
                item = family.process(modality, one, settings, 1)
            except QuireError as wrong:
                why = str(wrong)
                continue
            num_bytes = _num_bytes(item)
            fits = item.num_vectors <= most and num_bytes <= _MOST
            if fits and (best is None or item.num_vectors > best.num_vectors):
                best = item
            if num_bytes > _SMALL:
                break
        if best is not None:
            return best
    log.info("The memory that the encoder takes for %s items is not measured: %s", modality, why)
    return None


def _num_bytes(item: ProcessedItem) -> int:
    return sum(array.nbytes for array in item.arrays.values() if hasattr(array, "nbytes"))


def _images(hints: Mapping[str, int], num_frames: int) -> Iterator[tuple[Any, list[Any]]]:
    from quire.media.images import check_size, pillow  # lazy

    lib = pillow()
    if "width" in hints and "height" in hints:
        check_size(hints["width"], hints["height"])
        yield lib.Image.new("RGB", (hints["width"], hints["height"])), []
        return
    for step in range(_TRIES):
        side = _SIDE >> step
        edge = min(side, _CUT)
        others = [lib.Image.new("RGB", (edge, max(1, int(edge * ratio)))) for ratio in _RATIOS]
        yield lib.Image.new("RGB", (side, side)), others


def _videos(hints: Mapping[str, int], num_frames: int) -> Iterator[tuple[Any, list[Any]]]:
    from quire.media.images import check_size, pillow  # lazy
    from quire.media.video import Video  # lazy

    lib, num = pillow(), hints.get("num_frames", num_frames)
    size = hints.get("width", _FRAME[1]), hints.get("height", _FRAME[0])
    check_size(*size)
    for _ in range(_TRIES):
        yield Video([lib.Image.new("RGB", size)] * num, list(range(num)), 1.0, num), []
        num = max(1, num // 2)


def _sounds(hints: Mapping[str, int], num_frames: int) -> Iterator[tuple[Any, list[Any]]]:
    import numpy as np  # lazy

    from quire.media.audio import Audio  # lazy

    num = hints.get("length", _SECONDS * _RATE)
    for _ in range(_TRIES):
        yield Audio(np.zeros(num, np.float32), _RATE), []
        num = max(1, num // 2)
