"""Log-mel spectrograms as Whisper's feature extractor makes them, filter banks as Kaldi does, and magnitudes as
those of Universal Speech Models (Gemma 3n).

In: samples at the extractor's rate. Out: float32 (mel bins, frames), of the others (frames, bins). Must not know:
which model reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.media.pixels import Array
from quire.schema.errors import InputError

_BLOCK = 256  # frames transformed at once: their numbers stay in a second cache
MOST_NUMBERS = 1 << 26  # of all transforms of half a minute, and of the filters


def check_transforms(frames: int, size: int, bins: int, limit: int = MOST_NUMBERS) -> None:
    """Numbers of a file say how many frames there are, and how large."""
    if max(frames * size, frames * bins, bins * size) > limit:
        raise InputError(
            f"the feature extractor has up to {frames} frames with transforms of {size} numbers and {bins} bins: the "
            f"limit of the product of two of them is {limit}"
        )


def _windows(samples: Array, num: int, window: int, hop: int) -> Array:
    """(num, window) that overlap: nothing is copied."""
    import numpy as np  # lazy

    (step,) = samples.strides
    return np.lib.stride_tricks.as_strided(samples, (num, window), (hop * step, step), writeable=False)


@dataclass(frozen=True)
class MelOptions:
    bins: int = 80
    rate: int = 16000
    window: int = 400
    hop: int = 160


def log_mel(samples: Array, options: MelOptions) -> Array:
    """As many frames as the samples have hops; values lie within 8 decades of the largest, then near -1 to 1."""
    import numpy as np  # lazy

    half = options.window // 2
    padded = np.pad(samples.astype(np.float64), half, mode="reflect")
    num = len(samples) // options.hop
    frames = _windows(padded, num, options.window, options.hop)
    window = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(options.window) / options.window)
    filters = mel_filters(options)
    out = np.empty((options.bins, num), np.float32)
    for begin in range(0, num, _BLOCK):
        spectrum = np.fft.rfft(frames[begin : begin + _BLOCK] * window, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        out[:, begin : begin + _BLOCK] = np.log10(np.maximum(power @ filters, 1e-10)).T
    highest: Array = np.maximum(out, out.max() - np.float32(8.0))
    return (highest + np.float32(4.0)) / np.float32(4.0)


@dataclass(frozen=True)
class BankOptions:
    bins: int = 80
    rate: int = 16000
    window: int = 400
    hop: int = 160
    size: int = 512  # of a transform
    lowest: float = 0.0  # hertz
    highest: float = 7690.0
    emphasis: float = 0.97


def log_banks(samples: Array, options: BankOptions) -> Array:
    """Of whole windows only; loud as 16-bit samples are, at least 1 before the logarithm."""
    import numpy as np  # lazy

    num = (len(samples) - options.window) // options.hop + 1
    frames = _windows(np.ascontiguousarray(samples, np.float32), num, options.window, options.hop)
    window = 0.54 - 0.46 * np.cos(2 * math.pi * np.arange(options.window) / (options.window - 1))
    filters = bank_filters(options).astype(np.float32)
    out = np.empty((num, options.bins), np.float32)
    for begin in range(0, num, _BLOCK):
        here = frames[begin : begin + _BLOCK]
        before = np.concatenate([here[:, :1], here[:, :-1]], axis=1)
        louder = (here - np.float32(options.emphasis) * before) * np.float32(32768)
        spectrum = np.abs(np.fft.rfft(window * louder, options.size, axis=1).astype(np.complex64))
        out[begin : begin + _BLOCK] = np.log(np.maximum(spectrum**2 @ filters, np.float32(1)))
    return out


@dataclass(frozen=True)
class MagnitudeOptions:
    bins: int = 128
    rate: int = 16000
    window: int = 512
    hop: int = 160
    size: int = 1024  # of a transform
    lowest: float = 125.0  # hertz
    highest: float = 7600.0
    emphasis: float = 0.97
    floor: float = 1e-5  # before the logarithm


def log_magnitudes(samples: Array, options: MagnitudeOptions) -> Array:
    """Of windows that have one sample more behind them; the first sample of a window is louder by itself."""
    import numpy as np  # lazy

    num = max(0, (len(samples) - options.window - 1) // options.hop + 1)
    frames = _windows(np.ascontiguousarray(samples, np.float32), num, options.window, options.hop)
    window = (0.5 * (1 - np.cos(2 * np.pi * np.arange(options.window, dtype=np.float32) / options.window))).astype(
        np.float32
    )
    filters = magnitude_filters(options)
    out = np.empty((num, options.bins), np.float32)
    for begin in range(0, num, _BLOCK):
        here = frames[begin : begin + _BLOCK]
        first = here[:, :1] * (1.0 - options.emphasis)
        rest = here[:, 1:] - options.emphasis * here[:, :-1]
        spectrum = np.abs(np.fft.rfft(np.concatenate([first, rest], axis=1) * window, options.size, axis=1))
        out[begin : begin + _BLOCK] = np.log(np.maximum(spectrum @ filters, options.floor))
    return out


@lru_cache(maxsize=8)
def magnitude_filters(options: MagnitudeOptions) -> Any:
    """Triangles of height 1, straight over frequencies: (frequencies, bins)."""
    import numpy as np  # lazy

    low, high = (2595.0 * math.log10(1.0 + hertz / 700.0) for hertz in (options.lowest, options.highest))
    edges = 700.0 * (10 ** (np.linspace(low, high, options.bins + 2) / 2595.0) - 1.0)
    grid = np.arange(options.size // 2 + 1, dtype=np.float32) * (options.rate / options.size)
    rising = (grid[:, None] - edges[None, :-2]) / np.diff(edges)[None, :-1]
    falling = (edges[None, 2:] - grid[:, None]) / np.diff(edges)[None, 1:]
    return np.maximum(0, np.minimum(rising, falling))


@lru_cache(maxsize=8)
def bank_filters(options: BankOptions) -> Any:
    """Triangles of height 1, straight over the mel scale: (frequencies, bins)."""
    import numpy as np  # lazy

    def mels(hertz: Any) -> Any:
        return 1127.0 * np.log(1 + hertz / 700.0)

    edges = np.linspace(mels(options.lowest), mels(options.highest), options.bins + 2)
    grid = mels(np.arange(options.size // 2 + 1) * (options.rate / options.size))
    rising = (grid[:, None] - edges[None, :-2]) / np.diff(edges)[None, :-1]
    falling = (edges[None, 2:] - grid[:, None]) / np.diff(edges)[None, 1:]
    return np.maximum(0, np.minimum(rising, falling))


@lru_cache(maxsize=8)
def mel_filters(options: MelOptions) -> Any:
    """Triangles between mel frequencies on Slaney's scale up to 8 kHz, each of the same area: (frequencies, bins)."""
    import numpy as np  # lazy

    edges = _to_hertz(np.linspace(_to_mel(0.0), _to_mel(8000.0), options.bins + 2))
    grid = np.linspace(0, options.rate // 2, options.window // 2 + 1)
    rising = (grid[:, None] - edges[None, :-2]) / np.diff(edges)[None, :-1]
    falling = (edges[None, 2:] - grid[:, None]) / np.diff(edges)[None, 1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))[None]


_LINEAR_TO = 1000.0  # hertz; logarithmic above
_PER_MEL = 200.0 / 3
_LOG_STEP = math.log(6.4) / 27.0


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_TO:
        return hertz / _PER_MEL
    return _LINEAR_TO / _PER_MEL + math.log(hertz / _LINEAR_TO) / _LOG_STEP


def _to_hertz(mels: Array) -> Array:
    import numpy as np  # lazy

    bend = _LINEAR_TO / _PER_MEL
    return np.where(mels < bend, mels * _PER_MEL, _LINEAR_TO * np.exp(_LOG_STEP * (mels - bend)))
