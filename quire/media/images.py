"""Images: bytes, PIL images and arrays -> PIL images in RGB, within limits of pixels that are checked before decoding.

Only the first frame of an animation is decoded, only formats without scripts or external programs are opened, and
orientation follows EXIF where bytes are decoded, as transformers does. Must not know: how a model resizes.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.base import env
from quire.media.arrays import as_array
from quire.schema.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MOST_SIDE = 32768
_MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "RGBa",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
)
WHITE = (255, 255, 255)
_LAZY_PIXELS = tuple(threading.Lock() for _ in range(64))


def pillow() -> Any:
    try:
        import PIL.Image  # lazy
        import PIL.ImageOps  # lazy
    except ImportError:
        raise MissingExtraError("image input", "media", "pillow") from None
    return PIL


def decode_image(data: bytes, options: Mapping[str, Any] | None = None) -> Image:
    """`options`: those of media_io_kwargs["image"]."""
    lib = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own warning of bombs: our limit is lower
            image = lib.Image.open(io.BytesIO(data), formats=FORMATS)
    except lib.Image.DecompressionBombError:
        raise InputError(f"the image has more pixels than the limit of {env.MAX_IMAGE_PIXELS.get()}") from None
    except Exception as wrong:  # noqa: BLE001  a hostile header may break Pillow's parsers in many ways
        raise InputError(
            f"the image ({len(data)} bytes) cannot be read: {_short(wrong)}; known formats are {', '.join(FORMATS)}",
            param="image",
        ) from None
    check_size(image.width, image.height)
    if image.mode not in _MODES:
        raise InputError(f"the image has the pixel format {image.mode!r}, which is not supported", param="image")
    try:
        image.load()
        image = lib.ImageOps.exif_transpose(image)
    except Exception as wrong:  # noqa: BLE001
        raise InputError(f"the image cannot be decoded: {_short(wrong)}", param="image") from None
    check_size(image.width, image.height)
    return to_rgb(image, background_of(options))


def check_size(width: int, height: int) -> None:
    limit = env.MAX_IMAGE_PIXELS.get()
    if width < 1 or height < 1:
        raise InputError(f"an image of {width}x{height} pixels has no content", param="image")
    if max(width, height) > _MOST_SIDE:
        raise InputError(
            f"an image of {width}x{height} pixels is too long; the limit is {_MOST_SIDE} per side", param="image"
        )
    if width * height > limit:
        raise InputError(
            f"an image of {width}x{height} pixels has {width * height} pixels; the limit is {limit}",
            param="image",
            value=width * height,
        )


def check_frames(sizes: Sequence[tuple[int, int]]) -> None:
    """(height, width) of each frame of a video, once resized: small frames become large ones, and bytes floats."""
    _check_together(sizes, "frames", "num_frames", "media_io_kwargs")


def check_crops(sizes: Sequence[tuple[int, int]], fewer: str) -> None:
    """(height, width) of each part of an image, which may overlap. `fewer`: the setting that makes them fewer."""
    _check_together(sizes, "crops", fewer, "mm_processor_kwargs")


def _check_together(sizes: Sequence[tuple[int, int]], what: str, fewer: str, param: str) -> None:
    for height, width in set(sizes):
        check_size(width, height)
    limit, total = env.MAX_IMAGE_PIXELS.get(), sum(height * width for height, width in sizes)
    if total > limit:
        height, width = max(sizes, key=lambda size: size[0] * size[1])
        of = "of" if len(set(sizes)) == 1 else "of up to"
        raise InputError(
            f"{len(sizes)} {what} {of} {width}x{height} pixels have {total} pixels together; the limit is {limit}: "
            f"use fewer ({fewer})",
            param=param,
            value=total,
        )


def background_of(options: Mapping[str, Any] | None) -> tuple[int, int, int]:
    colour = (options or {}).get("rgba_background_color", WHITE)
    is_list = isinstance(colour, Sequence) and not isinstance(colour, (str, bytes)) and len(colour) == 3
    if not is_list or not all(isinstance(part, int) and 0 <= part <= 255 for part in colour):
        raise InputError(
            f"rgba_background_color must be three integers from 0 to 255, got {colour!r:.100}", param="media_io_kwargs"
        )
    return colour[0], colour[1], colour[2]


def to_rgb(image: Image, background: tuple[int, int, int] = WHITE) -> Image:
    """Transparency is laid over the background."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        lib = pillow()
        above = image.convert("RGBA")
        below = lib.Image.new("RGBA", above.size, (*background, 255))
        return lib.Image.alpha_composite(below, above).convert("RGB")  # type: ignore[no-any-return]
    return image.convert("RGB")


def read_image(value: Any, options: Mapping[str, Any] | None = None) -> Image:
    """Whatever stands under "image" offline: a PIL image, an array or tensor of pixels, bytes."""
    lib = pillow()
    if isinstance(value, lib.Image.Image):
        check_size(value.width, value.height)
        _read_pixels(value)
        return to_rgb(value, background_of(options))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_image(bytes(value), options)
    return _of_array(value, options)


def _read_pixels(image: Image) -> None:
    """An opened file is decoded at first use, which must not happen in two threads: prompts may share the image."""
    try:
        with _lock_of(image):
            image.load()
    except Exception as wrong:  # noqa: BLE001  the file behind it may be damaged or closed
        raise InputError(f"the image cannot be decoded: {_short(wrong)}", param="multi_modal_data") from None


def _lock_of(image: Image) -> threading.Lock:
    """Always the same one of an image; different images seldom share one."""
    return _LAZY_PIXELS[hash((id(image),)) % len(_LAZY_PIXELS)]


def _of_array(value: Any, options: Mapping[str, Any] | None) -> Image:
    """(height, width, channels), (channels, height, width) or (height, width); bytes, or floats from 0 to 1."""
    import numpy as np  # lazy

    array = as_array(value)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or (array.shape[-1] not in (1, 3, 4) and array.shape[0] not in (1, 3, 4)):
        raise InputError(
            f"an image array must be (height, width, channels) or (channels, height, width) with 1, 3 or 4 channels, "
            f"got the shape {array.shape}",
            param="multi_modal_data",
        )
    if array.shape[-1] not in (1, 3, 4) or (array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3)):
        array = np.moveaxis(array, 0, -1)
    check_size(array.shape[1], array.shape[0])
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InputError("pixels of an image array that are floats must lie between 0 and 1", param="image")
        array = np.round(array * 255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise InputError("pixels of an image array that are integers must lie between 0 and 255", param="image")
    array = array.astype(np.uint8)
    lib = pillow()
    return to_rgb(lib.Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array), background_of(options))


def _short(wrong: Exception) -> str:
    if type(wrong).__name__ == "UnidentifiedImageError":  # it tells where a buffer lies in memory
        return "it has none of the formats"
    return f"{type(wrong).__name__}: {wrong}"[:200]
