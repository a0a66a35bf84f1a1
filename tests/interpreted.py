"""Triton's interpreter, with three things put right: under numpy 2.4 and later an array of one element no longer turns
into a number, its casts to float8 drop the carry of a rounded mantissa (125 becomes 64), and from Triton 3.9 on a mask
that was combined with a single comparison has whole numbers, which its loads and stores refuse."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch, _convert = interpreter._patch_lang_tensor, interpreter._convert_float
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_OTHERS = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}


def _patch_with_item(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert_by_torch(data, source, target, rounding):
    if source not in _FLOAT8 and target not in _FLOAT8:
        return _convert(data, source, target, rounding)
    before, after = (_FLOAT8.get(dtype) or _OTHERS[dtype] for dtype in (source, target))
    numbers = torch.frombuffer(bytearray(data.tobytes()), dtype=before).to(torch.float32).to(after)
    bits = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[after.itemsize]).numpy()
    return bits.view(getattr(np, f"uint{8 * after.itemsize}")).reshape(data.shape)


interpreter._patch_lang_tensor = _patch_with_item
interpreter._convert_float = _convert_by_torch


_load, _store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store


def _of_bools(mask):
    if not isinstance(mask, interpreter.TensorHandle):
        return mask  # an array of bools: Triton 3.6, for descriptors
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


interpreter.InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest, **named: _load(
    self, ptrs, _of_bools(mask), *rest, **named
)
interpreter.InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest, **named: _store(
    self, ptrs, value, _of_bools(mask), *rest, **named
)
