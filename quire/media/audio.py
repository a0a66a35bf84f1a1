"""Audio: bytes and arrays -> one channel of float32 samples at the rate a model wants.

WAV is read here; other formats by soundfile or PyAV where they are installed. Headers are not believed: sizes come
from the bytes that are there, and every length is checked before memory is spent. Must not know: features of models.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.base import env
from quire.media.arrays import as_array
from quire.media.containers import as_file, open_container
from quire.schema.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import numpy as np

    Samples = np.ndarray[tuple[int], np.dtype[np.float32]]

_RATES = (1000, 768_000)
_MOST_CHANNELS = 64
_MOST_SAMPLES = 1 << 28  # of one channel: an hour and a half at 48 kHz, 1 GiB
_BLOCK = 1 << 16
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_HALF = 10  # zero crossings of the resampling filter on either side
_BETA = 5.0
_MOST_TAPS = 1 << 22
_SPARE_ROWS = 16  # a product of matrices may add up its last rows in another order
_MOST_CHUNKS = 1 << 12  # of a WAV file, before its samples


class Audio(NamedTuple):
    samples: Samples
    rate: int


def decode_audio(data: bytes | memoryview) -> Audio:
    """Channels are averaged."""
    import numpy as np  # lazy

    audio = _decode(data)
    if (num := len(audio.samples) - int(np.isfinite(audio.samples).sum())) > 0:
        raise InputError(
            f"{num} of the {len(audio.samples)} samples of the audio are not finite numbers of 32 bits", param="audio"
        )
    return audio


def _decode(data: bytes | memoryview) -> Audio:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE" and (audio := _read_wav(data)) is not None:
        return audio
    try:
        import soundfile  # lazy
    except ImportError:
        soundfile = None
    if soundfile is not None:
        try:
            return _read_by_soundfile(soundfile, data)
        except soundfile.LibsndfileError:
            pass  # a container that PyAV may know
    return _read_by_av(data)


def read_audio(value: Any) -> Audio:
    """Whatever stands under "audio" offline: (samples, rate), samples alone (at 16 kHz) or bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_audio(bytes(value))
    import numpy as np  # lazy

    rate: Any = None
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
    samples = as_array(value)
    if samples.dtype.kind not in "fiu" or samples.ndim not in (1, 2) or samples.size == 0:
        raise InputError(
            "audio must be (samples, rate) with samples of one channel or of (channels, samples), got an array of "
            f"shape {samples.shape} and type {samples.dtype}",
            param="multi_modal_data",
        )
    if samples.ndim == 2:  # channels first, or last where there are few
        samples = samples.mean(axis=0 if samples.shape[0] <= samples.shape[1] else 1)
    if rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.integer, np.floating)) or not rate == rate:
            raise InputError(f"the sampling rate of audio must be a number, got {rate!r:.60}", param="multi_modal_data")
        _check_rate(int(rate))
    real = 16000 if rate is None else int(rate)
    _check_length(len(samples), real)
    samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise InputError("audio samples must be finite numbers", param="multi_modal_data")
    return Audio(samples, real)


def _check_rate(rate: int) -> None:
    low, high = _RATES
    if not low <= rate <= high:
        raise InputError(f"audio with a sampling rate of {rate}; it must lie between {low} and {high}", param="audio")


def _check_length(num_samples: int, rate: int) -> None:
    if num_samples > (limit := env.MAX_AUDIO_SECONDS.get()) * rate:
        raise InputError(f"the audio lasts {num_samples / rate:.2f} s or more; the limit is {limit} s", param="audio")
    if num_samples > _MOST_SAMPLES:
        raise InputError(
            f"the audio has {num_samples} samples at {rate} Hz; the limit is {_MOST_SAMPLES}", param="audio"
        )


# ---- wav ------------------------------------------------------------------------------------------------------------


def _read_wav(data: bytes | memoryview) -> Audio | None:
    """None: a coding that is not plain numbers."""
    form: tuple[int, int, int, int] | None = None
    place, num_chunks = 12, 0
    while place + 8 <= len(data):
        num_chunks += 1
        if num_chunks > _MOST_CHUNKS:
            raise InputError(f"the WAV file has more than {_MOST_CHUNKS} chunks before its samples", param="audio")
        name, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        place += 8
        if name == b"fmt ":
            form = _read_form(bytes(data[place : place + min(size, 64)]))
        elif name == b"data":
            if form is None:
                raise InputError("the WAV file has samples before their format", param="audio")
            return _samples(memoryview(data)[place : place + size], *form)
        place += size + (size & 1)
    raise InputError("the WAV file has no samples", param="audio")


def _read_form(chunk: bytes) -> tuple[int, int, int, int]:
    if len(chunk) < 16:
        raise InputError(f"the WAV file's format has {len(chunk)} bytes; it must have 16", param="audio")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    _check_rate(rate)
    if not 1 <= channels <= _MOST_CHANNELS:
        raise InputError(f"the WAV file has {channels} channels; it may have 1 to {_MOST_CHANNELS}", param="audio")
    return kind, channels, rate, bits


def _samples(data: memoryview, kind: int, channels: int, rate: int, bits: int) -> Audio | None:
    import numpy as np  # lazy

    if (kind, bits) not in {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}:
        return None
    frame = channels * bits // 8
    num = len(data) // frame
    if num == 0:
        raise InputError("the WAV file has no samples", param="audio")
    _check_length(num, rate)
    raw = data[: num * frame]
    values: Any
    if kind == _FLOAT:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.frombuffer(raw, f"<f{bits // 8}").astype(np.float32)
    elif bits == 8:
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif bits == 24:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        values = whole.astype(np.float32) / (1 << 23)
    else:
        values = np.frombuffer(raw, f"<i{bits // 8}").astype(np.float32)
        values /= 1 << (bits - 1)
    return Audio(_mono(values, channels), rate)


def _mono(values: Any, channels: int) -> Samples:
    import numpy as np  # lazy

    with np.errstate(over="ignore", invalid="ignore"):
        samples: Samples = values.reshape(-1) if channels == 1 else values.reshape(-1, channels).mean(axis=1)
    return samples


# ---- other formats --------------------------------------------------------------------------------------------------


def _read_by_soundfile(soundfile: Any, data: bytes | memoryview) -> Audio:
    import numpy as np  # lazy

    with soundfile.SoundFile(as_file(data)) as file:
        rate, channels = int(file.samplerate), int(file.channels)
        _check_rate(rate)
        if channels > _MOST_CHANNELS:
            raise InputError(f"the audio has {channels} channels; the limit is {_MOST_CHANNELS}", param="audio")
        blocks, num = [], 0
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            num += len(block)
            _check_length(num, rate)
            blocks.append(_mono(block, channels))
    if not blocks:
        raise InputError("the audio has no samples", param="audio")
    return Audio(np.concatenate(blocks), rate)


def _read_by_av(data: bytes | memoryview) -> Audio:
    import numpy as np  # lazy

    try:
        import av  # lazy
    except ImportError:
        raise MissingExtraError("audio other than WAV", "media", "soundfile (or av)") from None
    blocks, num, rate = [], 0, 0
    try:
        with open_container(av, data) as container:
            stream = next(iter(container.streams.audio), None)
            if stream is None:
                raise InputError("the file has no audio", param="audio")
            if stream.codec_context is None:
                raise InputError(f"the audio ({len(data)} bytes) has a coding that cannot be decoded", param="audio")
            rate = int(stream.rate or 0)
            _check_rate(rate)
            resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
            for frame in container.decode(stream):
                for part in resampler.resample(frame):
                    block = part.to_ndarray()[0]
                    num += len(block)
                    _check_length(num, rate)
                    blocks.append(block)
    except (av.FFmpegError, ValueError, OverflowError, EOFError) as wrong:
        if isinstance(wrong, InputError):
            raise
        raise InputError(
            f"the audio ({len(data)} bytes) cannot be decoded: {str(wrong)[:200]}", param="audio"
        ) from None
    if not blocks:
        raise InputError("the audio has no samples", param="audio")
    return Audio(np.concatenate(blocks).astype(np.float32), rate)


# ---- another rate ---------------------------------------------------------------------------------------------------


def resample(audio: Audio, rate: int, most: int | None = None) -> Samples:
    """A windowed sinc, in as many phases as the ratio of the rates has. `most`: samples of the result; of what follows
    nothing is computed."""
    if audio.rate == rate:
        return audio.samples[:most]
    common = math.gcd(audio.rate, rate)
    up, down = rate // common, audio.rate // common
    taps, centre = _taps(up, down)
    if most is not None:  # with all that its last samples depend on, and some rows of each phase more
        reach = (most * down + centre) // up + 1 + _SPARE_ROWS * down
        audio = audio._replace(samples=audio.samples[:reach])
    return _filtered(audio, up, down, taps, centre)[:most]


def _filtered(audio: Audio, up: int, down: int, taps: Any, centre: int) -> Samples:
    import numpy as np  # lazy

    source, num = audio.samples, -(-len(audio.samples) * up // down)
    width = taps.shape[1]
    padded = np.concatenate([np.zeros(width, np.float32), source, np.zeros(width + down, np.float32)])
    out = np.empty(num, np.float32)
    for phase in range(min(up, num)):
        # output n = phase + k * up stands at n * down / up of the source
        place = phase * down + centre
        first, row = place // up, taps[place % up]
        count = len(range(phase, num, up))
        begin = first - width + 1 + width
        step = padded.strides[0]
        windows = np.lib.stride_tricks.as_strided(padded[begin:], (count, width), (down * step, step), writeable=False)
        out[phase::up] = windows @ row
    return out


@lru_cache(maxsize=16)
def _taps(up: int, down: int) -> tuple[Any, int]:
    """(phases, taps) of the filter, each row reversed so that it is multiplied with a window; and its centre."""
    import numpy as np  # lazy

    widest = max(up, down)
    half = _HALF * widest
    if 2 * half + 1 > _MOST_TAPS:
        raise InputError(
            f"audio cannot be resampled by {up}/{down}: the filter has {2 * half + 1} taps, because the rates have a "
            f"small common divisor; the limit is {_MOST_TAPS}",
            param="audio",
        )
    steps = np.arange(-half, half + 1)
    kernel = np.sinc(steps / widest) * np.kaiser(2 * half + 1, _BETA)
    kernel *= up / kernel.sum()
    width = -(-len(kernel) // up)
    grid = np.zeros(width * up)
    grid[: len(kernel)] = kernel
    return np.ascontiguousarray(grid.reshape(width, up).T[:, ::-1]).astype(np.float32), half


def options_rate(options: Mapping[str, Any], default: int) -> int:
    rate = options.get("sampling_rate", default)
    if isinstance(rate, bool) or not isinstance(rate, int):
        raise InputError(f"sampling_rate must be an integer, got {rate!r:.60}", param="mm_processor_kwargs")
    _check_rate(rate)
    return rate
