"""Media given as embeddings: what the encoder would have made, (vectors, width of the model), checked and placed as it
is.

Behind enable_mm_embeds. Must not know: how bytes of a request become an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.media.arrays import as_stored, shape_of
from quire.media.families.base import Family, ProcessedItem
from quire.schema.errors import InputError
from quire.schema.media import ArrayData

ARRAY = "embeds"
_MOST_VECTORS = 1 << 20


@dataclass(frozen=True)
class EmbedsRef:
    """Embeddings of one item, or of several if there are three dimensions."""

    array: ArrayData


def is_embeds(value: Any, width: int | None) -> bool:
    """A float array of two dimensions, the last of which is the width of the model."""
    if isinstance(value, EmbedsRef):
        return True
    if isinstance(value, Mapping):
        return any(str(key).endswith("_embeds") for key in value)
    shape = shape_of(value)
    return len(shape) == 2 and shape[-1] == width and _is_float(value)


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and "float" in str(value.dtype)


def split(value: Any, width: int | None) -> list[Any] | None:
    """(items, vectors, width) -> a list of (vectors, width); None: no embeddings of several items."""
    if isinstance(value, EmbedsRef) and len(value.array.shape) == 3:
        num, vectors, columns = value.array.shape
        size = len(value.array.data) // max(num, 1)
        return [
            EmbedsRef(ArrayData((vectors, columns), value.array.dtype, value.array.data[i * size : (i + 1) * size]))
            for i in range(num)
        ]
    shape = shape_of(value)
    if len(shape) == 3 and shape[-1] == width and _is_float(value):
        return [value[index] for index in range(shape[0])]
    return None


def embeds_item(value: Any, modality: str, family: Family, width: int | None) -> ProcessedItem:
    if isinstance(value, Mapping):
        if set(value) != {f"{modality}_embeds"}:
            raise InputError(
                f"{modality} embeddings with {', '.join(sorted(map(str, value)))[:200]}: only {modality}_embeds alone "
                "is supported for this model",
                param="multi_modal_data",
            )
        value = value[f"{modality}_embeds"]
    data = value.array if isinstance(value, EmbedsRef) else _array_data(value)
    if len(data.shape) == 3 and data.shape[0] == 1:
        data = ArrayData(data.shape[1:], data.dtype, data.data)
    if len(data.shape) != 2 or data.shape[1] != width or not 1 <= data.shape[0] <= _MOST_VECTORS:
        raise InputError(
            f"{modality} embeddings have the shape {list(data.shape)[:6]}; expected (vectors, {width})",
            param="multi_modal_data",
        )
    _check_finite(data)
    return ProcessedItem({ARRAY: data}, family.embeds_text(modality, data.shape[0]), data.shape[0])


def _check_finite(data: ArrayData) -> None:
    if data.dtype not in ("float16", "float32", "bfloat16"):
        raise InputError(
            f"media embeddings must be float32, float16 or bfloat16, got {data.dtype}", param="multi_modal_data"
        )
    if not are_finite(data.data, data.dtype):
        raise InputError("media embeddings must be finite numbers", param="multi_modal_data")


def are_finite(data: bytes, dtype: str) -> bool:
    """Of float32, float16 or bfloat16, as stored: no NaN and no infinity."""
    import numpy as np  # lazy

    if dtype == "bfloat16":
        return bool(((np.frombuffer(data, "<u2") & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))).all())


def _array_data(value: Any) -> ArrayData:
    import numpy as np  # lazy

    array, dtype = as_stored(value)
    if dtype == "float64":
        array, dtype = array.astype(np.float32), "float32"
    if dtype not in ("float16", "float32", "bfloat16"):
        raise InputError(f"media embeddings must be floats, got {dtype}", param="multi_modal_data")
    return ArrayData(tuple(map(int, array.shape)), dtype, np.ascontiguousarray(array).tobytes())
