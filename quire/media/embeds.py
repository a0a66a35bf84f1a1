"""Media given as embeddings: what the encoder would have made, (vectors, width of the model), checked and placed as it
is.

Behind enable_mm_embeds. Must not know: how bytes of a request become an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    shape = _shape(value)
    return len(shape) == 2 and shape[-1] == width and "float" in str(value.dtype)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") and hasattr(value, "dtype") else ()


def split(value: Any, width: int | None) -> list[Any] | None:
    """(items, vectors, width) -> a list of (vectors, width); None: no embeddings of several items."""
    if isinstance(value, EmbedsRef) and len(value.array.shape) == 3:
        num, vectors, columns = value.array.shape
        size = len(value.array.data) // max(num, 1)
        return [
            EmbedsRef(ArrayData((vectors, columns), value.array.dtype, value.array.data[i * size : (i + 1) * size]))
            for i in range(num)
        ]
    shape = _shape(value)
    if len(shape) == 3 and shape[-1] == width and "float" in str(value.dtype):
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
    import numpy as np  # lazy

    if data.dtype == "bfloat16":
        is_finite = ((np.frombuffer(data.data, "<u2") & 0x7F80) != 0x7F80).all()
    elif data.dtype in ("float16", "float32"):
        is_finite = np.isfinite(np.frombuffer(data.data, np.dtype(data.dtype).newbyteorder("<"))).all()
    else:
        raise InputError(
            f"media embeddings must be float32, float16 or bfloat16, got {data.dtype}", param="multi_modal_data"
        )
    if not is_finite:
        raise InputError("media embeddings must be finite numbers", param="multi_modal_data")


def _array_data(value: Any) -> ArrayData:
    """Of numpy or torch; bfloat16 has no numpy type, so its bytes are taken as they are."""
    import numpy as np  # lazy

    name = str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else ""
    if name == "bfloat16" and hasattr(value, "detach"):
        plain = value.detach().cpu().contiguous()
        return ArrayData(tuple(map(int, plain.shape)), name, plain.view(_int16(plain)).numpy().tobytes())
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.name not in ("float16", "float32", "float64"):
        raise InputError(f"media embeddings must be floats, got {array.dtype.name}", param="multi_modal_data")
    array = array.astype(np.float32) if array.dtype.name == "float64" else array
    return ArrayData(tuple(map(int, array.shape)), array.dtype.name, np.ascontiguousarray(array).tobytes())


def _int16(tensor: Any) -> Any:
    """torch.int16, without importing torch: the type of a tensor viewed as 16-bit integers."""
    return tensor.short().dtype
