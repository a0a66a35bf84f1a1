"""Media for programs that prepare their own requests: from URLs, as base64 text, in another mode.

What a program fetches here is its own choice: files anywhere, and public hosts, within the limits of requests. Must not
know: models, prompts.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media.audio import decode_audio
from quire.media.images import background_of, decode_image, to_rgb
from quire.media.sources import MediaSources
from quire.media.video import decode_video
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_SOURCES = MediaSources(local_path="/")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")


def convert_image_mode(image: Image, to_mode: str) -> Image:
    """Transparency becomes white where the new mode has none."""
    if to_mode == "RGB":
        return to_rgb(image)
    return image if image.mode == to_mode else image.convert(to_mode)


def fetch_image(image_url: str, image_io_kwargs: Mapping[str, Any] | None = None) -> Image:
    background_of(image_io_kwargs)
    return decode_image(_SOURCES.read(image_url, "image"), image_io_kwargs)


def fetch_audio(audio_url: str, audio_io_kwargs: Mapping[str, Any] | None = None) -> tuple[Any, int]:
    """(samples, rate)."""
    audio = decode_audio(_SOURCES.read(audio_url, "audio"))
    return audio.samples, audio.rate


def fetch_video(video_url: str, video_io_kwargs: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """(frames, metadata), which is one item under "video"."""
    import numpy as np  # lazy

    video = decode_video(_SOURCES.read(video_url, "video"), video_io_kwargs)
    metadata = {"fps": video.fps, "frames_indices": video.indices, "total_num_frames": video.total}
    return np.stack([np.asarray(frame) for frame in video.frames]), metadata


def encode_image_base64(image: Image, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    if format.upper() not in _FORMATS:
        raise InputError(f"format must be one of {', '.join(_FORMATS)}, got {format!r:.60}", param="format")
    out = io.BytesIO()
    convert_image_mode(image, image_mode).save(out, format.upper())
    return base64.b64encode(out.getvalue()).decode()


def encode_audio_base64(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """One channel of samples from -1 to 1."""
    import numpy as np  # lazy

    if format.upper() != "WAV":
        raise InputError(f"format must be WAV, got {format!r:.60}", param="format")
    samples = np.clip(np.asarray(audio, np.float64), -1, 1)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(sampling_rate))
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return base64.b64encode(out.getvalue()).decode()
