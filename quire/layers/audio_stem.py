"""The front of an audio encoder: two convolutions over time, the second of which halves the number of frames.

In: features of one recording, [bins, frames]. Out: a vector for every two frames. Must not know: positions, layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quire.quant.scheme import Slot, Storage

_TAPS = 3


class Convolution(nn.Module):
    """Over time, then GELU: [channels, frames] -> [width, frames / stride]. `name`: canonical, without leaf."""

    def __init__(self, name: str, channels: int, width: int, storage: Storage, *, stride: int) -> None:
        super().__init__()
        self.name, self.stride = name, stride
        self.weight, self.bias = storage.parameter(width, channels, _TAPS), storage.parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv1d(x[None], self.weight, self.bias, stride=self.stride, padding=_TAPS // 2)
        return nn.functional.gelu(y[0])

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight.data)
        yield Slot(f"{self.name}.bias", self.bias.data)


class AudioStem(nn.Module):
    """`prefix`: canonical name of the module around it, with its final dot."""

    def __init__(self, prefix: str, bins: int, width: int, storage: Storage) -> None:
        super().__init__()
        self.bins = bins
        self.first = Convolution(f"{prefix}conv1", bins, width, storage, stride=1)
        self.second = Convolution(f"{prefix}conv2", width, width, storage, stride=2)

    def forward(self, features: Tensor) -> Tensor:
        """[frames / 2, width]."""
        return self.second(self.first(features)).t().contiguous()
