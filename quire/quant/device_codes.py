"""Which form of a device's kernels holds a coded matrix of a checkpoint; and plain numbers rounded to such forms.

In: a CodedMatrix, or numbers. Out: a CodedWeight, without a loss for codes that a checkpoint has; None where no kernel
takes them (the caller decodes). Must not know: which kernels multiply it, or whose matrix it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.coded import (
    CENTRES,
    COARSE,
    LARGEST,
    MIDDLE,
    CodedWeight,
    block_chunk,
    chunk_of,
    is_packed,
    pack_halves,
    pack_quarters,
)
from quire.quant.coded import (
    AffineCodes,
    CodedMatrix,
    FloatCodes,
    GGUFBlocks,
    Grid,
    InputCoding,
    OpenBlocks,
    open_halves,
)

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
    if isinstance(coded, GGUFBlocks) and coded.opens is not None:
        return _of_blocks(coded.opens(coded.raw))
    return None


def four_bits(blocks: GGUFBlocks) -> AffineCodes | FloatCodes | None:
    """Blocks in the forms of 4 bits that other formats have too: least numbers as zero points between codes, and one
    level of scales. None: they have more bits, or their codes index a table."""
    opened = None if blocks.opens is None else blocks.opens(blocks.raw)
    if opened is None or opened.kind not in ("int4", "fp4"):
        return None
    codes, scale, group = opened.codes, opened.scale, opened.group
    if opened.kind == "fp4":
        if scale.dtype is torch.float32:  # of MXFP4: powers of two
            scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
        return FloatCodes(codes[:, ::2] | codes[:, 1::2] << 4, "e2m1", Grid(scale, 1, group))
    levels = None if opened.coarse is None else opened.coarse.float().repeat_interleave(COARSE // group, 2)
    if levels is not None:
        scale = scale * levels[0]
    if opened.least is None:
        return AffineCodes(codes, 4, Grid(scale, 1, group), opened.middle)
    least = opened.least.float() if levels is None else opened.least * levels[1]
    same = scale == 0  # a group of one number: 0 - least
    zero = torch.where(same, least, opened.middle + least / torch.where(same, 1, scale.float()))
    codes = (codes.unflatten(1, (-1, group)) * ~same[:, :, None]).flatten(1)
    return AffineCodes(codes, 4, Grid(torch.where(same, 1, scale), 1, group), Grid(zero, 1, group))


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
    alike = {
        (p.kind, p.width, p.group, p.rounds, p.middle, p.codes.dtype, p.codes.ndim, p.codes.shape[-1]) for p in parts
    }
    if len(alike) > 1:
        return None
    if not _same_tensors(parts):
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
        high=_cat([p.high for p in parts], 1),
        least=_cat([None if p.least is None else p.least.to(dtype) for p in parts], 1),
        coarse=_cat([p.coarse for p in parts], 1),
    )


def _same_tensors(parts: Sequence[CodedWeight]) -> bool:
    """Whether what blocks have beside codes is there in all parts, or in none."""
    return len({(p.is_blocked, p.high is None, p.least is None, _levels(p)) for p in parts}) == 1


def _levels(weight: CodedWeight) -> torch.dtype | None:
    return None if weight.coarse is None else weight.scale.dtype


def _cat(parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there, axis) if there else None


def empty_like(some: CodedWeight, rows: int) -> CodedWeight:
    """Coded as these rows are, and not filled."""
    codes = some.codes
    return some._replace(
        codes=_empty(codes, rows, 1) if codes.ndim == 3 else _empty(codes, rows, 0),
        scale=_empty(some.scale, rows, 1),
        zero=None if some.zero is None else _empty(some.zero, rows, 1),
        rows=rows,
        high=None if some.high is None else _empty(some.high, rows, 1),
        least=None if some.least is None else _empty(some.least, rows, 1),
        coarse=None if some.coarse is None else _empty(some.coarse, rows, 1),
    )


def _empty(like: Tensor, rows: int, axis: int) -> Tensor:
    return like.new_empty((*like.shape[:axis], rows, *like.shape[axis + 1 :]))


def put_rows(whole: CodedWeight, start: int, part: CodedWeight) -> bool:
    """Write these rows of a matrix where they lie; False: it is coded differently."""
    same = whole._replace(
        codes=part.codes, scale=part.scale, zero=part.zero, rows=part.rows, high=part.high, least=part.least,
        coarse=part.coarse,
    )  # fmt: skip
    alike = _same_tensors((whole, part)) and same == part
    layout = whole.codes.dtype is part.codes.dtype and whole.codes.shape[-1] == part.codes.shape[-1]
    narrows = whole.scale.dtype is torch.float16 and part.scale.dtype is not torch.float16
    if not alike or not layout or narrows or not _can_hold(whole.zero, part.zero):
        return False
    stop = start + part.rows
    (whole.codes[:, start:stop] if whole.codes.ndim == 3 else whole.codes[start:stop]).copy_(part.codes)
    whole.scale[:, start:stop].copy_(part.scale)
    for name, there in whole.tensors().items():
        if name not in ("codes", "scale"):
            there[:, start:stop].copy_(part.tensors()[name])
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
        if not isinstance(zero, Grid) and not _fits_around_middle(coded.bits, zero):
            values = coded.scale.values
            zero = Grid(torch.full(values.shape, zero, dtype=torch.uint8, device=values.device), *coded.scale[1:])
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


def _fits_around_middle(bits: int, zero: int) -> bool:
    """Whether codes of so many bits have 4 when their zero point is moved to the middle."""
    moved = MIDDLE - zero
    return moved >= 0 and (1 << bits) - 1 + moved < 16


def _with_zeros(coded: AffineCodes, zero: Grid, chunk: int, scale: Tensor, group: int) -> CodedWeight:
    """4 bits. Kernels round how far a zero point is from the middle to 16 bits. So that float ones lose little by it,
    codes of fewer bits are moved there."""
    is_float = zero.values.is_floating_point()
    shift = MIDDLE - (1 << coded.bits - 1) if is_float else 0
    zeros = _groups_first(zero, coded.shape) + shift
    codes = pack_halves(coded.codes + shift, chunk)
    return CodedWeight("int4", codes, scale, zeros if is_float else zeros.to(torch.uint8), *coded.shape, group)


def _of_blocks(opened: OpenBlocks) -> CodedWeight | None:
    (rows, width), kind, group = opened.codes.shape, opened.kind, opened.group
    if group > _LARGE_GROUP:  # large groups of 4-bit codes have forms that other formats have too
        scale = opened.scale.float().t().contiguous()
        return CodedWeight(kind, pack_halves(opened.codes, chunk_of(width, group)), scale, None, rows, width, group)
    codes, middle, high = opened.codes, opened.middle, None
    chunk = block_chunk(kind, width, group)
    if not chunk and kind == "int6":  # rows that are too narrow for chunks of 6 bits
        kind, codes, middle = "int8", (codes - CENTRES["int6"]).view(torch.int8), middle - CENTRES["int6"]
        chunk = block_chunk(kind, width, group)
    if not chunk:
        return None
    if kind == "int6":
        codes, high = pack_quarters(codes, chunk)
    elif is_packed(kind):
        codes = pack_halves(codes, chunk)
    scale = opened.scale if opened.coarse is not None else _lossless(opened.scale)
    least, coarse = opened.least, opened.coarse
    return CodedWeight(
        kind, codes, _by_chunks(scale, chunk, group), None, rows, width, group, high=high,
        least=None if least is None else _by_chunks(least.to(scale.dtype), chunk, group),
        coarse=None if coarse is None else coarse.expand(2, -1, -1).permute(2, 1, 0).contiguous(), middle=middle,
    )  # fmt: skip


def _by_chunks(values: Tensor, chunk: int, group: int) -> Tensor:
    """[rows, groups] -> [chunks, rows, groups of a chunk]."""
    return values.unflatten(1, (-1, chunk // group)).transpose(0, 1).contiguous()


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
    if scale.dtype is torch.float16:
        return scale
    narrow = scale.half()
    return narrow if torch.equal(narrow.float(), scale) else scale
