"""What an encoder of media takes of a GPU: measured with the largest items, before there is a KV cache.

In: an encoder, items, and how the peak of a call is measured. Out: bytes. An item that the encoder cannot read by
itself, or that does not fit, is left out: what it takes is then not known, and no start fails for it. Must not know:
how large items are chosen, budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quire.base.log import logger
from quire.schema.errors import ConfigError
from quire.schema.media import MediaItem
from quire.worker.media import MediaEncoder, exact_convolutions, tensor_of

_log = logger(__name__)
GIB = 1 << 30


class EncoderBytes(NamedTuple):
    peak: int  # for a moment, while an item is encoded
    cached: int  # vectors that are kept for later steps


def measure_encoder(
    encoder: MediaEncoder,
    items: Sequence[MediaItem],
    device: torch.device,
    dtype: torch.dtype,
    num_cached: int,
    peak: Callable[[Callable[[], None]], int],
) -> EncoderBytes:
    """`num_cached`: vectors that are kept at most, or as many as the largest item has."""
    largest = EncoderBytes(0, 0)
    for item in items:
        shapes: list[torch.Size] = []

        def encode(item: MediaItem = item, shapes: list[torch.Size] = shapes) -> None:
            arrays = {name: tensor_of(array, device) for name, array in item.arrays.items()}
            with torch.inference_mode(), exact_convolutions(dtype):
                shapes.append(encoder.encode(item.modality, arrays).to(dtype).shape)

        try:
            num_bytes = peak(encode)
        except ConfigError as wrong:  # it does not fit: requests with such items will fail, others need not
            _log.warning("No memory is left for the encoder of %s items: %s", item.modality, wrong)
            continue
        except Exception as wrong:  # noqa: BLE001  # of code that is not ours
            _log.info("The memory that the encoder takes for %s items is not measured: %s", item.modality, wrong)
            continue
        cached = max(num_cached, shapes[0][0]) * shapes[0][1] * dtype.itemsize
        _log.info(
            "Media: %.2f GiB for the largest %s item (%d vectors), %.2f GiB for vectors that are kept",
            num_bytes / GIB, item.modality, shapes[0][0], cached / GIB,
        )  # fmt: skip
        largest = EncoderBytes(max(largest.peak, num_bytes), max(largest.cached, cached))
    return largest
