"""The front of an audio encoder: two convolutions over time, the second of which halves the number of frames.

In: features of one recording, [bins, frames]. Out: a vector for every two frames. Must not know: positions, layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quire.quant.scheme import Slot, Storage

_TAPS = 3


class AudioStem(nn.Module):
    """`prefix`: canonical name of the module around it, with its final dot."""

    def __init__(self, prefix: str, bins: int, width: int, storage: Storage) -> None:
        super().__init__()
        self.prefix, self.bins = prefix, bins
        self.weight1, self.bias1 = storage.parameter(width, bins, _TAPS), storage.parameter(width)
        self.weight2, self.bias2 = storage.parameter(width, width, _TAPS), storage.parameter(width)

    def forward(self, features: Tensor) -> Tensor:
        """[frames / 2, width]."""
        gelu, convolve = nn.functional.gelu, nn.functional.conv1d
        x = gelu(convolve(features[None], self.weight1, self.bias1, padding=1))
        x = gelu(convolve(x, self.weight2, self.bias2, stride=2, padding=1))
        return x[0].t().contiguous()

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.prefix}conv1.weight", self.weight1.data)
        yield Slot(f"{self.prefix}conv1.bias", self.bias1.data)
        yield Slot(f"{self.prefix}conv2.weight", self.weight2.data)
        yield Slot(f"{self.prefix}conv2.bias", self.bias2.data)
