"""What encoders take of a GPU, with a clock in place of the device's counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.schema.errors import ConfigError
from quire.schema.media import ArrayData, MediaItem
from quire.worker.encoder_memory import measure_encoder


def item(modality: str, num: int) -> MediaItem:
    return MediaItem(modality=modality, key=modality, offset=0, length=num,
                     arrays={"x": ArrayData((num, 2), "float32", bytes(8 * num))})  # fmt: skip


class Encoder:
    num_channels, both_ways = 0, ""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        self.seen.append(modality)
        if modality == "video":
            raise ValueError("it needs to know its tokens")
        return arrays["x"].repeat(1, 4)

    def channels(self, prompt: Any, media: Any) -> Any: ...

    def reload(self, other: Any) -> None: ...


def measured(items: list[MediaItem], peak: Callable[[Callable[[], None]], int], num: int = 5) -> tuple[int, int]:
    return tuple(measure_encoder(Encoder(), items, torch.device("cpu"), torch.bfloat16, num, peak))  # type: ignore[return-value]


def test_the_most_of_all_items() -> None:
    peaks = iter((100, 700, 300))

    def peak(run: Callable[[], None]) -> int:
        run()
        return next(peaks)

    items = [item("image", 3), item("audio", 9), item("image", 1)]
    assert measured(items, peak) == (700, 9 * 8 * 2)
    assert measured([], peak) == (0, 0)


def test_what_cannot_be_encoded_alone_is_left_out() -> None:
    def peak(run: Callable[[], None]) -> int:
        run()
        return 10

    assert measured([item("video", 3), item("image", 2)], peak) == (10, 5 * 8 * 2)


def test_a_start_does_not_fail_for_an_item_that_does_not_fit() -> None:
    sizes = iter((None, 40))

    def peak(run: Callable[[], None]) -> int:
        run()
        if (size := next(sizes)) is None:
            raise ConfigError("the largest media item does not fit the GPU")
        return size

    assert measured([item("image", 9), item("audio", 2)], peak) == (40, 5 * 8 * 2)
