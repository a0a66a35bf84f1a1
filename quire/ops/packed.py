"""Matrices packed in blocks of a few bits per weight, and matmuls with them.

In: stored blocks (of a GGUF file), codes with scales, or plain weights. Out: `Packed`, which compiled kernels multiply
directly. The layout is described in csrc/cpu/blocks.h; here it is decoded in torch, which is the reference. Without
kernels nothing is packed. Must not know: files, layers, models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op

PANEL, BLOCK = 16, 32


class PackedFormat(NamedTuple):
    """How a kind stores a value: value = scale * (q - zero), or scale * q + added; 16 bits are the value itself."""

    bits: int
    zero: int = 0
    added: bool = False
    halves: bool = False  # a scale for each half of a block

    @property
    def num_bytes(self) -> int:
        """Of 16 columns times 32 inputs."""
        if self.bits >= 16:
            return 64 * self.bits
        return (
            32 * (1 + (self.added or self.halves))
            + {4: 0, 5: 64, 6: 128, 8: 0}[self.bits]
            + (512 if self.bits == 8 else 256)
        )


FORMS = {
    "Q4M": PackedFormat(4, added=True),
    "Q4Z": PackedFormat(4, 8),
    "Q5M": PackedFormat(5, added=True),
    "Q5Z": PackedFormat(5, 16),
    "Q6Z": PackedFormat(6, 32, halves=True),
    "Q8Z": PackedFormat(8),
    "B16": PackedFormat(16),
    "B32": PackedFormat(32),
}


@dataclass
class Matrix:
    """Packed parts stacked along the rows, for one matmul. `handle` belongs to the form that multiplies."""

    parts: tuple[Packed, ...]
    handle: Any = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class Packed(NamedTuple):
    """Rows of a matrix [rows, width], all of one kind. `data` is uint8, flat."""

    data: Tensor
    kind: str
    rows: int
    width: int


@op
def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, width] decoded values."""
    form = FORMS[packed.kind]
    panels, blocks = -(-packed.rows // PANEL), packed.width // BLOCK
    if form.bits >= 16:
        together, plain = (2, torch.bfloat16) if form.bits == 16 else (1, torch.float32)
        inputs = packed.data.view(plain).view(panels, packed.width // together, PANEL, together)
        return inputs.transpose(1, 2).reshape(panels * PANEL, packed.width)[: packed.rows].to(dtype)
    raw = packed.data.view(panels, blocks, -1)
    scales = raw[..., :32].contiguous().view(torch.float16).float()  # [P, B, 16]
    at = 64 if form.added or form.halves else 32
    second = raw[..., 32:64].contiguous().view(torch.float16).float() if at == 64 else scales
    q = _quads(raw[..., at:], form).unflatten(3, (16, 4))  # [P, B, 8 quads, 16 columns, 4]
    q = q.transpose(2, 3).flatten(3)  # [P, B, 16, 32]
    if form.halves:
        values = (q - form.zero).unflatten(3, (2, 16)) * torch.stack((scales, second), 3)[..., None]
        values = values.flatten(3)
    else:
        values = (q - form.zero) * scales[..., None]
        values = values + second[..., None] if form.added else values
    return values.transpose(1, 2).reshape(panels * PANEL, packed.width)[: packed.rows].to(dtype)


def _quads(raw: Tensor, form: PackedFormat) -> Tensor:
    """Planes [P, B, bytes] -> integers [P, B, 8, 64] as float32."""
    if form.bits == 8:
        return raw.contiguous().view(torch.int8).unflatten(2, (8, 64)).float()
    top = form.num_bytes - 256 - (64 if form.added or form.halves else 32)
    low = raw[..., top:].unflatten(2, (4, 64))
    q = torch.cat((low & 15, low >> 4), 2).float()
    if form.bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        q += ((raw[..., None, :64] >> shifts) & 1) * 16.0
    if form.bits == 6:
        shifts = torch.arange(4, dtype=torch.uint8)[:, None] * 2
        pairs = (raw[..., :128].unflatten(2, (2, 1, 64)) >> shifts) & 3  # [P, B, 2, 4, 64]
        q += pairs.flatten(2, 3) * 16.0
    return q


@op
def packed_linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """x @ matrix.T + bias. Compiled forms round x to 8 bits in groups of 32 before multiplying, except for B16
    and B32, which are never combined with another kind."""
    weight = torch.cat([unpack.reference(part) for part in matrix.parts])
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


@op
def kind_of(type_id: int) -> str | None:
    """The kind that blocks of a GGUF type are packed to; None: they cannot be packed (without kernels, none can)."""
    return None


@op
def pack(raw: Tensor, type_id: int, rows: int, width: int) -> Packed:
    """Pack stored blocks, uint8 in file order; lossless except for scales rounded to float16."""
    raise NotImplementedError("packing exists as compiled code only")


@op
def pack_codes(q: Tensor, scales: Tensor, added: Tensor | None, kind: str) -> Packed:
    """Codes uint8 [rows, width] as the kind stores them (Q8Z: signed bytes), with a scale for each block of 32 (kinds
    with halves: of 16) and what is added to it: float16 [rows, blocks]. Without a loss."""
    form, (rows, width) = FORMS[kind], q.shape
    panels, blocks = -(-rows // PANEL), width // BLOCK
    padded = F.pad(q, (0, 0, 0, panels * PANEL - rows))
    quads = padded.view(panels, PANEL, blocks, 8, 4).permute(0, 2, 3, 1, 4).reshape(panels, blocks, 8, 64)
    beside = [half[..., 0] for half in scales.unflatten(1, (blocks, -1)).split(1, -1)]
    if added is not None:
        beside.append(added)
    planes = [_column_bytes(numbers, panels) for numbers in beside]
    if form.bits == 5:
        planes.append(_joined([(quads[:, :, i] >> 4 & 1) << i for i in range(8)]))
    if form.bits == 6:
        top = (quads >> 4 & 3).unflatten(2, (2, 4))
        planes.append(_joined([top[:, :, :, i] << 2 * i for i in range(4)]).flatten(2))
    low = quads if form.bits == 8 else quads[:, :, :4] & 15 | (quads[:, :, 4:] & 15) << 4
    planes.append(low.flatten(2))
    return Packed(torch.cat(planes, 2).view(-1), kind, rows, width)


def _joined(bits: list[Tensor]) -> Tensor:
    return reduce(torch.bitwise_or, bits)


def _column_bytes(numbers: Tensor, panels: int) -> Tensor:
    """float16 [rows, blocks] -> bytes [panels, blocks, 16 columns * 2]."""
    padded = F.pad(numbers, (0, 0, 0, panels * PANEL - numbers.shape[0]))
    return padded.view(panels, PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8)


@op
def pack_numbers(numbers: Tensor, kind: str) -> Packed:
    """Pack plain weights [rows, width], rounded to the nearest value of Q8Z or Q4M."""
    raise NotImplementedError("packing exists as compiled code only")


@op
def likes_panels(dtype: torch.dtype, whole_texts: bool = False) -> bool:
    """Whether matmuls with plain weights of this dtype are faster in panels. whole_texts: of a model whose time goes to
    the reading of whole texts, not to steps of a few rows: it writes none, or less than its encoder reads."""
    return False


def panel_kind(dtype: torch.dtype) -> str:
    """The kind that a plain matrix of this dtype has in panels."""
    return "B32" if dtype is torch.float32 else "B16"


@op
def lay_panels(weight: Tensor, back: bool = False) -> None:
    """A plain matrix [rows, width], rows a multiple of 16 and width of 32, becomes one of its `panel_kind` in place:
    its bytes are then the `data` of a Packed. `back` reverses it."""
    (rows, width), together = weight.shape, 4 // weight.element_size()
    chunks = width // together
    shape = (rows // PANEL, chunks, PANEL, together) if back else (rows // PANEL, PANEL, chunks, together)
    weight.copy_(weight.view(shape).transpose(1, 2).contiguous().view(rows, width))


@op
def packed_rows(index: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    """Decoded rows [*index, width]: an embedding."""
    return unpack.reference(packed, dtype)[index]
