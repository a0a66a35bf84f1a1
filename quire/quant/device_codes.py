"""Which form of a device's kernels holds a coded matrix of a checkpoint; and plain numbers rounded to such forms.

In: a CodedMatrix, or numbers. Out: a CodedWeight, without a loss for codes that a checkpoint has; None where no kernel
takes them (the caller decodes). Must not know: which kernels multiply it, or whose matrix it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.coded import LARGEST, MIDDLE, CodedWeight, chunk_of, pack_halves
from quire.quant.coded import AffineCodes, CodedMatrix, FloatCodes, Grid, InputCoding, open_halves

_SMALLEST_GROUP = 32  # of codes of 8 bits
_LARGE_GROUP = 128  # from which on scales are few, and float32: some kernels read no others
FP8 = torch.float8_e4m3fn


def device_codes(coded: CodedMatrix) -> CodedWeight | None:
    """None: no kernel takes these codes."""
    if not min(coded.shape):
        return None
    if isinstance(coded, FloatCodes):
        return _small_floats(coded)
    if isinstance(coded, AffineCodes):
        return _whole_numbers(coded)
    return None


def round_to_fp8(numbers: Tensor) -> CodedWeight:
    """[rows, width], a scale for each row."""
    wide = numbers.float()
    scale = wide.abs().amax(1).clamp(min=1e-12) / LARGEST[FP8]
    rows, width = numbers.shape
    return CodedWeight("fp8", (wide / scale[:, None]).to(FP8), scale[None], None, rows, width, width, rounds=True)


def round_to_affine(numbers: Tensor, bits: int, group: int, inputs: str = "none") -> AffineCodes:
    """[rows, width] as symmetric whole numbers of `bits` bits, each group to its largest."""
    rows, width = numbers.shape
    parts = numbers.float().view(rows, -1, group)
    middle = 1 << bits - 1
    top = parts.abs().amax(-1).clamp(min=1e-12)
    scale = top / torch.full_like(top, middle - 1)  # a GPU multiplies by the reciprocal of a plain number: other ties
    codes = (parts / scale[:, :, None]).round_().add_(middle).clamp_(0, 2 * middle - 1).to(torch.uint8)
    return AffineCodes(codes.view(rows, width), bits, Grid(scale, 1, group), middle, None, InputCoding(inputs, "token"))


def join(parts: Sequence[CodedWeight]) -> CodedWeight | None:
    """One under another; None: they are coded differently."""
    first = parts[0]
    if len(parts) == 1:
        return first
    alike = {(p.kind, p.width, p.group, p.rounds, p.codes.dtype, p.codes.ndim, p.codes.shape[-1]) for p in parts}
    if len(alike) > 1:
        return None
    zeros = [p.zero for p in parts]
    zero = None
    if any(each is not None for each in zeros):
        zero = torch.cat([_zeros_of(p) for p in parts], 1)
    scales = {p.scale.dtype for p in parts}
    dtype = scales.pop() if len(scales) == 1 else torch.float32
    return first._replace(
        codes=torch.cat([p.codes for p in parts], 1 if first.codes.ndim == 3 else 0),
        scale=torch.cat([p.scale.to(dtype) for p in parts], 1),
        zero=zero,
        rows=sum(p.rows for p in parts),
    )


def put_rows(whole: CodedWeight, start: int, part: CodedWeight) -> bool:
    """Write these rows of a matrix where they lie; False: it is coded differently."""
    alike = whole._replace(codes=part.codes, scale=part.scale, zero=part.zero, rows=part.rows) == part
    layout = whole.codes.dtype is part.codes.dtype and whole.codes.shape[-1] == part.codes.shape[-1]
    narrows = whole.scale.dtype is torch.float16 and part.scale.dtype is not torch.float16
    if not alike or not layout or narrows or not _can_hold(whole.zero, part.zero):
        return False
    stop = start + part.rows
    (whole.codes[:, start:stop] if whole.codes.ndim == 3 else whole.codes[start:stop]).copy_(part.codes)
    whole.scale[:, start:stop].copy_(part.scale)
    if whole.zero is not None and part.zero is not None:
        whole.zero[:, start:stop].copy_(part.zero)
    return True


def _can_hold(there: Tensor | None, zero: Tensor | None) -> bool:
    if there is None or zero is None:
        return there is zero
    return there.dtype == torch.promote_types(there.dtype, zero.dtype)


def _zeros_of(weight: CodedWeight) -> Tensor:
    if weight.zero is not None:
        return weight.zero
    dtype, value = (torch.uint8, MIDDLE) if weight.kind == "int4" else (torch.int16, 0)
    return torch.full(weight.scale.shape, value, dtype=dtype, device=weight.scale.device)


def _small_floats(coded: FloatCodes) -> CodedWeight | None:
    rows, width = coded.shape
    scale = coded.scales()
    group = _group_of(scale, width)
    if coded.kind == "e2m1":
        chunk = chunk_of(width, group) if group else 0
        if not chunk:
            return None
        codes = pack_halves(open_halves(coded.codes), chunk)
        return CodedWeight("fp4", codes, _groups_first(scale, coded.shape), None, rows, width, group)
    if coded.codes.dtype is not FP8 or not group or (group != width and group % _SMALLEST_GROUP):
        return None
    rounds = coded.inputs.form == "fp8"
    values = _groups_first(scale, coded.shape)
    return CodedWeight("fp8", coded.codes.contiguous(), values, None, rows, width, group, rounds)


def _whole_numbers(coded: AffineCodes) -> CodedWeight | None:
    rows, width = coded.shape
    group, zero = _group_of(coded.scale, width), coded.zero
    if coded.groups is not None or not group or (isinstance(zero, Grid) and zero.columns != coded.scale.columns):
        return None
    scale = _groups_first(coded.scale, coded.shape)
    if group < _LARGE_GROUP:
        scale = _lossless(scale)
    if coded.bits <= 4:
        chunk = chunk_of(width, group)
        if not chunk:
            return None
        if isinstance(zero, Grid):
            return _with_zeros(coded, zero, chunk, scale, group)
        return CodedWeight("int4", pack_halves(coded.codes + (MIDDLE - zero), chunk), scale, None, rows, width, group)
    # A zero point rounded to 16 bits may be off by a quarter of a code of 8 bits.
    if (
        coded.bits > 8
        or (isinstance(zero, Grid) and zero.is_fractional())
        or (group != width and group % _SMALLEST_GROUP)
    ):
        return None
    codes = (coded.codes ^ 128).view(torch.int8)  # less 128
    if isinstance(zero, Grid) or zero != 128:
        zeros = (_groups_first(zero, coded.shape) if isinstance(zero, Grid) else torch.full_like(scale, zero)) - 128
        return CodedWeight("int8", codes, scale, zeros.to(torch.int16), rows, width, group)
    rounds = coded.inputs.form == "int8" and group == width
    return CodedWeight("int8", codes, scale, None, rows, width, group, rounds)


def _with_zeros(coded: AffineCodes, zero: Grid, chunk: int, scale: Tensor, group: int) -> CodedWeight:
    """4 bits. Kernels round how far a zero point is from the middle to 16 bits. So that float ones lose little by it,
    codes of fewer bits are moved there."""
    is_float = zero.values.is_floating_point()
    shift = MIDDLE - (1 << coded.bits - 1) if is_float else 0
    zeros = _groups_first(zero, coded.shape) + shift
    codes = pack_halves(coded.codes + shift, chunk)
    return CodedWeight("int4", codes, scale, zeros if is_float else zeros.to(torch.uint8), *coded.shape, group)


def _group_of(grid: Grid, width: int) -> int:
    """Columns that share a value; 0: groups are cut short at the edge."""
    if grid.values.shape[1] == 1:
        return width
    return grid.columns if width % grid.columns == 0 else 0


def _groups_first(grid: Grid, shape: tuple[int, int]) -> Tensor:
    """float32 [groups, rows]."""
    return grid.spread(shape).float().t().contiguous()


def _lossless(scale: Tensor) -> Tensor:
    """In float16 where that has every scale as it is."""
    narrow = scale.half()
    return narrow if torch.equal(narrow.float(), scale) else scale
