"""Video: bytes and arrays -> a few RGB frames with their times.

How many frames there are is counted without decoding; those to be used are chosen; only they are converted. Limits of
frames and pixels are checked before. Must not know: how a model resizes frames.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.base import env
from quire.media.arrays import as_array
from quire.media.containers import open_container
from quire.media.images import check_size, pillow
from quire.schema.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_FRAMES = 32  # as documented; -1 is all
MOST_USED = 2048
MOST_SECONDS = 60.0  # of decoding one video
IMAGES = 4  # of the largest size that is allowed: so many pixels may the used frames have together


class Video(NamedTuple):
    frames: list[Image]
    indices: list[int]  # of the frames in the file
    fps: float | None  # of the file
    total: int


def choose_frames(total: int, fps: float | None, options: Mapping[str, Any]) -> list[int]:
    """`options`: those of media_io_kwargs["video"]. Evenly spread from the first to the last; `fps` bounds how many."""
    num, rate = options.get("num_frames", DEFAULT_FRAMES), options.get("fps", -1)
    if isinstance(num, bool) or not isinstance(num, int) or (num < 1 and num != -1):
        raise InputError(f"num_frames must be a positive integer or -1, got {num!r:.60}", param="media_io_kwargs")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate == rate:
        raise InputError(f"fps must be a number, got {rate!r:.60}", param="media_io_kwargs")
    num = total if num == -1 else min(num, total)
    if rate > 0 and fps:
        num = max(1, min(num, int(total / fps * rate)))
    if num > MOST_USED:
        raise InputError(f"{num} frames of a video would be used; the limit is {MOST_USED}", param="media_io_kwargs")
    if num == 1:
        return [0]
    return [index * (total - 1) // (num - 1) for index in range(num)]


def decode_video(data: bytes, options: Mapping[str, Any] | None = None) -> Video:
    try:
        import av  # lazy
    except ImportError:
        raise MissingExtraError("video input", "media", "av") from None
    try:
        with open_container(av, data) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                raise InputError("the file has no video", param="video")
            if stream.codec_context is None:
                raise InputError(f"the video ({len(data)} bytes) has a coding that cannot be decoded", param="video")
            check_size(stream.codec_context.width, stream.codec_context.height)
            total = _count(container, stream)
            fps = float(stream.average_rate) if stream.average_rate else None
            indices = choose_frames(total, fps, options or {})
            _check_pixels(len(indices) * stream.codec_context.width * stream.codec_context.height)
        with open_container(av, data) as container:  # some containers cannot be wound back
            frames = _take(container, container.streams.video[0], indices)
    except (av.FFmpegError, ValueError, OverflowError, EOFError) as wrong:
        if isinstance(wrong, InputError):
            raise
        raise InputError(
            f"the video ({len(data)} bytes) cannot be decoded: {str(wrong)[:200]}", param="video"
        ) from None
    if not frames:
        raise InputError("the video has no frames that can be decoded", param="video")
    return Video(frames, indices[: len(frames)], fps, total)


def _check_pixels(num: int) -> None:
    limit = IMAGES * env.MAX_IMAGE_PIXELS.get()
    if num > limit:
        raise InputError(
            f"the frames that would be used have {num} pixels together; the limit is {limit}: use fewer (num_frames)",
            param="media_io_kwargs",
        )


def _count(container: Any, stream: Any) -> int:
    """Packets, not what the header says; it stops at the limit."""
    limit = env.MAX_VIDEO_FRAMES.get()
    if stream.frames > limit:
        raise InputError(f"the video has {stream.frames} frames; the limit is {limit}", param="video")
    total = 0
    for packet in container.demux(stream):
        total += packet.size > 0
        if total > limit:
            raise InputError(f"the video has more than the limit of {limit} frames", param="video")
    if not total:
        raise InputError("the video has no frames", param="video")
    return total


def _take(container: Any, stream: Any, indices: list[int]) -> list[Image]:
    stream.thread_type = "SLICE"  # frame threads would hold many decoded frames
    numbers, frames, pixels = set(indices), [], 0
    end = time.monotonic() + MOST_SECONDS
    for number, frame in enumerate(container.decode(stream)):
        if time.monotonic() > end:
            raise InputError(f"decoding the video takes longer than {MOST_SECONDS:g} s", param="video")
        if number in numbers:
            check_size(frame.width, frame.height)
            pixels += frame.width * frame.height  # which may change within a stream
            _check_pixels(pixels)
            frames.append(frame.to_image())
        if number >= indices[-1]:
            break
    return frames


def read_video(value: Any, options: Mapping[str, Any] | None = None) -> Video:
    """Whatever stands under "video" offline: frames as an array, a tensor or a list, (frames, metadata), or bytes.
    Frames are used as they are, because the caller has chosen them."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_video(bytes(value), options)
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    frames = _frames(value)
    fps = metadata.get("fps")
    indices = metadata.get("frames_indices")
    listed = list(range(len(frames))) if indices is None else [int(index) for index in indices]
    if len(listed) != len(frames):
        raise InputError(f"frames_indices has {len(listed)} entries for {len(frames)} frames", param="multi_modal_data")
    total = int(metadata.get("total_num_frames") or len(frames))
    return Video(frames, listed, float(fps) if fps else None, total)


def _frames(value: Any) -> list[Image]:
    import numpy as np  # lazy

    from quire.media.images import read_image  # lazy

    lib = pillow()
    if isinstance(value, (list, tuple)):
        _check_count(len(value))
        return [read_image(frame) for frame in value]
    array = as_array(value)
    if array.ndim != 4 or array.dtype.kind not in "iu" or (array.shape[-1] != 3 and array.shape[1] != 3):
        raise InputError(
            "a video array must be whole numbers of shape (frames, height, width, 3) or (frames, 3, height, width), "
            f"got {array.shape} of type {array.dtype}",
            param="multi_modal_data",
        )
    _check_count(len(array))
    array = array if array.shape[-1] == 3 else np.moveaxis(array, 1, -1)
    check_size(array.shape[2], array.shape[1])
    return [lib.Image.fromarray(frame.astype(np.uint8)) for frame in array]


def _check_count(num: int) -> None:
    if not 1 <= num <= MOST_USED:
        raise InputError(f"a video of {num} frames; there may be 1 to {MOST_USED}", param="multi_modal_data")
