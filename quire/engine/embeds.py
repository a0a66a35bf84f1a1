"""Embeddings in place of a prompt: from a caller's tensor, or the text of one, to media items that are vectors already.

Owns: which shapes and dtypes are embeddings of this model's prompts. A prompt of n vectors has n tokens, all of them
the placeholder 0, which nothing reads. It is cut into pieces, each an item of its own, so that prompts with an equal
beginning share it in the prefix cache. Must not know: torch; a caller's tensor is asked for its numbers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from quire.engine.torch_tensor import FLOATS, NUMBERS, DenseTensor, read_tensor
from quire.media.arrays import shape_of
from quire.media.embeds import are_finite
from quire.schema.errors import InputError
from quire.schema.media import ArrayData, MediaItem

MODALITY = "embeds"
NOT_ENABLED = "prompt_embeds are accepted only if the engine was started with enable_prompt_embeds=True"
PIECE = 128  # positions
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FORM = "one vector for each token, [tokens, {width}], of float32, float16 or bfloat16"


def decode_embeds(
    text: str, *, width: int, most: int, name: str = "prompt_embeds", param: str = "prompt_embeds"
) -> DenseTensor:
    """base64 of what torch.save wrote; `most` vectors of `width` numbers at most."""
    return _decoded(text, most * width, 3, FLOATS, name, param)


def decode_numbers(text: str, *, most: int, name: str, param: str) -> DenseTensor:
    """As decode_embeds, of `most` numbers that say something of embeddings."""
    return _decoded(text, most, 2, NUMBERS, name, param)


def _decoded(text: str, most: int, most_dims: int, dtypes: Sequence[str], name: str, param: str) -> DenseTensor:
    longest = most * (4 if dtypes is FLOATS else 8) + (1 << 16)  # bytes: the file has little besides its numbers
    if len(text) * 3 // 4 > longest:
        raise InputError(
            f"{name} has {len(text)} characters; {most} numbers need no more than {longest * 4 // 3}", param=param
        )
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise InputError(f"{name} is not base64: {wrong}", param=param) from None
    return read_tensor(content, most_dims=most_dims, most_items=most, dtypes=dtypes, name=name, param=param)


def media_of(embeds: Any, *, width: int, most: int, keep: int | None = None) -> tuple[MediaItem, ...]:
    """The prompt as items. `embeds`: a DenseTensor, or a caller's array. `keep`: how many of the last vectors stay."""
    tensor = embeds if isinstance(embeds, DenseTensor) else _numbers_of(embeds, width, most)
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    _check_shape(shape, width)
    if tensor.dtype not in _SIZES:
        raise InputError(f"prompt_embeds has dtype {tensor.dtype}: expected {_FORM.format(width=width)}",
                         param="prompt_embeds")  # fmt: skip
    first = 0 if keep is None else max(0, shape[0] - keep)
    row = width * _SIZES[tensor.dtype]
    numbers = tensor.data[first * row :]
    if not are_finite(numbers, tensor.dtype):
        raise InputError("prompt_embeds must be finite numbers, and it has NaN or infinity", param="prompt_embeds")
    return tuple(_pieces(numbers, shape[0] - first, width, tensor.dtype))


def _check_shape(shape: tuple[int, ...], width: int) -> None:
    if len(shape) != 2 or shape[1] != width or shape[0] < 1:
        raise InputError(
            f"prompt_embeds has shape {list(shape)[:8]}: expected {_FORM.format(width=width)}", param="prompt_embeds"
        )


def _pieces(data: bytes, count: int, width: int, dtype: str) -> Iterator[MediaItem]:
    row = width * _SIZES[dtype]
    for at in range(0, count, PIECE):
        length = min(PIECE, count - at)
        numbers = data[at * row : (at + length) * row]
        key = f"{MODALITY} {dtype} {sha256(numbers).hexdigest()}"
        arrays = {MODALITY: ArrayData((length, width), dtype, numbers)}
        yield MediaItem(modality=MODALITY, key=key, offset=at, length=length, arrays=arrays)


def _numbers_of(value: Any, width: int, most: int) -> DenseTensor:
    """Of a torch tensor, or whatever numpy reads."""
    import numpy as np  # lazy

    shape = shape_of(value, "prompt_embeds")
    if not shape and not isinstance(value, list | tuple):
        raise InputError(f"prompt_embeds is a {type(value).__name__}: expected {_FORM.format(width=width)}",
                         param="prompt_embeds")  # fmt: skip
    if shape and len(shape) == 2 and shape[0] > most:
        raise InputError(f"prompt_embeds has {shape[0]} vectors, and max_model_len is {most}", param="prompt_embeds")
    if shape:
        _check_shape(shape[1:] if len(shape) == 3 and shape[0] == 1 else shape, width)
    try:
        if hasattr(value, "detach"):
            if str(value.dtype) not in ("torch.float32", "torch.float16", "torch.bfloat16"):
                raise InputError(
                    f"prompt_embeds has dtype {value.dtype}: expected {_FORM.format(width=width)}",
                    param="prompt_embeds",
                )
            if value.is_sparse or str(value.layout) != "torch.strided":
                raise InputError(f"prompt_embeds is {value.layout}: expected {_FORM.format(width=width)}",
                                 param="prompt_embeds")  # fmt: skip
            value = value.detach().cpu().float().numpy()
        array = np.asarray(value)
        if array.dtype.kind != "f":
            raise InputError(f"prompt_embeds has dtype {array.dtype}: expected {_FORM.format(width=width)}",
                             param="prompt_embeds")  # fmt: skip
        with np.errstate(over="ignore"):  # infinity is refused later
            array = np.ascontiguousarray(array, np.dtype("<f4") if array.dtype != np.float16 else np.dtype("<f2"))
    except InputError:
        raise
    except Exception as wrong:  # noqa: BLE001  # a caller's object may raise anything
        raise InputError(f"prompt_embeds cannot be read: {wrong}", param="prompt_embeds") from None
    return DenseTensor(array.shape, "float16" if array.dtype == np.float16 else "float32", array.tobytes())
