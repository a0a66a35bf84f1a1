"""A hostile library: torch whose roundings follow the shape of a call, a number's place in it, and memory addresses.

`with Hostile():` lets every operator of torch run, and then moves each floating-point result by a few units in its last
place, as told by the operator's name, the shapes, strides and alignments of all tensors it was given, and the number's
place in the result. That is what MKL, oneDNN and vector loops with scalar tails may do on some machine; here they do it
on every machine, at once. Only operators that every library must give the same bits for are left alone: moves of
data, comparisons, and single IEEE operations. Bits that survive this do not depend on the library at all.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 64  # bytes: what torch gives to memory of its own, and the widest vector
_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16,
             torch.float16: torch.int16}  # fmt: skip
_REACH = {torch.float64: 9, torch.float32: 9, torch.bfloat16: 1, torch.float16: 2}  # units moved at most
# Near zero and infinity a step would change more than a bit.
_FIRM = {dtype: (torch.finfo(dtype).tiny * 2, torch.finfo(dtype).max / 2) for dtype in _REACH}
_SPAN = 1 << 20
_RANDOM = torch.randint(1 << 20, (2 * _SPAN,), generator=torch.Generator().manual_seed(11))
_STEPS = {dtype: (_RANDOM % (2 * reach + 1) - reach).to(_INTEGERS[dtype]) for dtype, reach in _REACH.items()}

# Moves of numbers, choices among them, and single operations that IEEE 754 defines to the last bit.
_EXACT = frozenset(
    """
    _to_copy _unsafe_view abs add alias amax amin arange argmax argsort as_strided bfloat16 broadcast_to cat ceil chunk
    clamp clamp_max clamp_min clone constant_pad_nd contiguous copy detach diagonal div double embedding empty
    empty_like empty_strided eq expand expand_as fill flatten float floor full full_like gather ge gt half hstack index
    index_add index_copy index_put index_select isfinite isinf isnan item le lift_fresh lt masked_fill masked_select
    max maximum min minimum movedim mul narrow narrow_copy ne neg new_empty new_empty_strided new_full new_ones
    new_zeros nonzero ones ones_like pad permute put ravel relu repeat repeat_interleave reshape _reshape_alias resize
    round rsub scalar_tensor scatter select select_scatter slice slice_scatter sort split split_with_sizes square
    squeeze stack sub swapaxes t take tensor_split to topk transpose tril triu type_as unbind unflatten unfold
    unsafe_chunk unsafe_split unsqueeze view view_as vstack where zero zeros zeros_like
    """.split()  # noqa: SIM905
)


class Hostile(TorchDispatchMode):
    def __init__(self, only: frozenset[str] | None = None) -> None:
        """`only`: operators to be hostile with; None: all that are not exact. `moved` counts their calls."""
        super().__init__()
        self.only, self.moved = only, Counter[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks, and would wrap every call; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _is_exact(name, args, kwargs) if self.only is None else name not in self.only:
            return func(*args, **kwargs)
        salt = _salt(name, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if tensor.dtype in _INTEGERS and tensor.device.type == "cpu" and tensor.numel():
                self.moved[name] += 1
                _move(tensor, salt)
        return out


def _is_exact(name: str, args: Any, kwargs: Any) -> bool:
    bare = name if name in _EXACT else name.removesuffix("_")
    if bare == "pow":
        return len(args) > 1 and args[1] == 2
    if bare in ("add", "sub", "rsub") and kwargs.get("alpha", 1) != 1:
        return False  # a product and a sum: one rounding or two
    return bare in _EXACT


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _salt(name: str, args: Any, kwargs: Any) -> int:
    given = [*_tensors(args), *_tensors(list(kwargs.values()))]
    seen = [(tuple(t.shape), t.stride(), t.data_ptr() % ALIGNMENT, t.dtype) for t in given]
    return zlib.crc32(repr((name, seen)).encode())


def _move(tensor: Tensor, salt: int) -> None:
    first = salt % _SPAN
    assert tensor.numel() <= _SPAN, "this library is for small models"
    steps = _STEPS[tensor.dtype][first : first + tensor.numel()].view(tensor.shape)
    low, high = _FIRM[tensor.dtype]
    size = tensor.abs()
    tensor.view(_INTEGERS[tensor.dtype]).add_(steps * size.gt(low).logical_and_(size.lt_(high)))
