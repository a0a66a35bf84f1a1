"""A caller's array, tensor or list of numbers -> a numpy array.

Owns: which tensors can be read at all. A sparse, nested or quantized one, or one without data, is refused here,
whatever error its own library has for it. Must not know: torch, what the numbers are.
"""

from __future__ import annotations

from typing import Any

from quire.schema.errors import InputError
from quire.schema.media import ArrayData


def as_array(value: Any) -> Any:
    """bfloat16, which numpy lacks, becomes float32."""
    import numpy as np  # lazy

    if not hasattr(value, "detach"):
        return np.asarray(value)
    try:
        tensor = value.detach().cpu()
        return (tensor.float() if _is_bfloat16(tensor) else tensor.resolve_neg()).numpy()
    except (RuntimeError, TypeError) as wrong:
        raise _refused(value, wrong) from None


def as_stored(value: Any) -> tuple[Any, str]:
    """With the name of its type: bfloat16 stays what it is, as whole numbers of 16 bits."""
    if not (hasattr(value, "detach") and _is_bfloat16(value)):
        array = as_array(value)
        return array, array.dtype.name
    try:
        plain = value.detach().cpu().contiguous()
        return plain.view(plain.short().dtype).numpy(), "bfloat16"
    except (RuntimeError, TypeError) as wrong:
        raise _refused(value, wrong) from None


def _is_bfloat16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def shape_of(value: Any, param: str = "multi_modal_data") -> tuple[int, ...]:
    """Of an array or a tensor; () for whatever has none."""
    try:
        return tuple(value.shape)
    except AttributeError:
        return ()
    except RuntimeError as wrong:  # of a nested tensor: each of its parts has a shape
        raise _refused(value, wrong, param) from None


def cut(value: Any, start: int, end: int) -> Any:
    """From one place of the first dimension to another."""
    if isinstance(value, ArrayData):
        row = len(value.data) // max(value.shape[0], 1)
        return ArrayData((end - start, *value.shape[1:]), value.dtype, value.data[start * row : end * row])
    try:
        return value[start:end]
    except (RuntimeError, TypeError, IndexError) as wrong:  # of a sparse or nested tensor
        raise _refused(value, wrong) from None


def _refused(value: Any, wrong: Exception, param: str = "multi_modal_data") -> InputError:
    return InputError(
        f"a {type(value).__name__} that is not a plain array of numbers cannot be read: {str(wrong)[:200]}",
        param=param,
    )
