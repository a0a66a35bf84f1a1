"""PackedScheme: matrices kept in the blocks or codes that a checkpoint stores, or rounded to blocks at load.

Each part of a fused matrix (q, k, v) has a kind of its own, because a file may store them differently; what arrives as
plain numbers and is not to be rounded, or has a shape that blocks do not fit, stays plain. Parts all packed are one
matmul. Must not know: which model a matrix belongs to, or where its blocks come from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.ops.linear import linear
from quire.ops.op import Kernels
from quire.ops.packed import (
    BLOCK,
    Matrix,
    Packed,
    kind_of,
    pack,
    pack_codes,
    pack_numbers,
    packed_linear,
    packed_rows,
    unpack,
)
from quire.quant.arena import Arena
from quire.quant.block_codes import bears_rounding, block_codes
from quire.quant.coded import CodedMatrix, GGUFBlocks
from quire.quant.experts import ExpertScheme, Separate
from quire.quant.scheme import (
    MatrixShape,
    PartSlot,
    PlainScheme,
    RunTarget,
    StoredMatrix,
    WeightScheme,
    WeightTarget,
    new_parameter,
)

Part = Packed | Tensor
PLAIN_NAMES = ("kv_b_proj", "gate", "shared_expert_gate")  # last names of matrices whose numbers layers read themselves
OUTER_NAMES = ("embed_tokens", "lm_head")  # 8 bits where others are rounded to 4, which they bear worst


class PackedScheme:
    name = "packed"

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels, kind: str | None = None) -> None:
        """`kind`: what plain numbers are rounded to; None leaves them plain."""
        self.dtype, self.arena, self.kind = dtype, arena, kind
        self.linear, self.packed_linear = kernels.of(linear), kernels.of(packed_linear)
        self.packed_rows = kernels.of(packed_rows)
        self._kind_of, self._pack, self._pack_numbers = kernels.of(kind_of), kernels.of(pack), kernels.of(pack_numbers)
        self._pack_codes = kernels.of(pack_codes)

    def create(self, shape: MatrixShape) -> PackedMatrix:
        return PackedMatrix(shape, self)

    def packs(self, type_id: int) -> bool:
        return self._kind_of(type_id) is not None

    def stored_form(self, source: Tensor | CodedMatrix) -> Part:
        """A part as it is to be stored."""
        if isinstance(source, GGUFBlocks):
            if self.packs(source.type_id):
                return self._pack(source.raw, source.type_id, *source.shape)
            source = source.numbers()
        elif isinstance(source, CodedMatrix):
            codes = block_codes(source)
            if codes is not None:
                return self._pack_codes(*codes)
            if bears_rounding(source):
                return self._pack_numbers(source.numbers(), "Q8Z")
            source = source.numbers()
        if self.kind is not None and source.dim() == 2 and source.shape[1] % BLOCK == 0:
            return self._pack_numbers(source, self.kind)
        stored = self.arena.empty(tuple(source.shape), self.dtype)
        stored.copy_(source)
        return stored


class PackedMatrix(StoredMatrix):
    name = "packed"

    def __init__(self, shape: MatrixShape, scheme: PackedScheme) -> None:
        self.shape, self._scheme = shape, scheme
        self.parts: dict[str, Part] = {}  # by name; "" is the whole
        self._weights: dict[str, nn.Parameter] = {}
        self.bias = new_parameter((shape.rows,), scheme.dtype, scheme.arena) if shape.has_bias else None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part, weight in self._weights.items():
            yield (f"weight_{part.replace('.', '_')}" if part else "weight"), weight  # torch's names have no dots
        if self.bias is not None:
            yield "bias", self.bias

    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        is_all = len(run) > 1 and run == tuple(self.shape.parts)
        parts = [PartTarget(self, "" if is_all else name, self._size(run if is_all else (name,))) for name in run]
        target = parts[0] if is_all or len(run) == 1 else RunTarget(parts)
        yield PartSlot("weight", target, self.shape.cut_of(run))
        yield from self._bias_slots(run)

    def _size(self, run: tuple[str, ...]) -> tuple[int, int]:
        start, stop = self.shape.rows_of(run)
        return stop - start, self.shape.width.count

    def keep(self, part: str, source: Tensor | CodedMatrix) -> None:
        """One part arrived, perhaps while another thread brings the next."""
        self.put(part, self._scheme.stored_form(source))

    def put(self, part: str, stored: Part) -> None:
        """A part as it is to be stored. The whole replaces parts, and they it."""
        for name in ("",) if part else tuple(self.shape.parts):
            self.parts.pop(name, None)
            self._weights.pop(name, None)
        self.parts[part], self.packed = stored, None
        numbers = stored.data if isinstance(stored, Packed) else stored
        self._weights[part] = nn.Parameter(numbers, requires_grad=False)

    def finish(self) -> None:
        by_name = self.parts
        self.parts = {name: by_name[name] for name in dict.fromkeys(("", *self.shape.parts)) if name in by_name}
        self._weights = {name: self._weights[name] for name in self.parts}  # not as they came: alike on all ranks
        parts = [part for part in self.parts.values() if isinstance(part, Packed)]
        self.packed = Matrix(tuple(parts)) if parts and len(parts) == len(by_name) else None

    def multiply(self, x: Tensor) -> Tensor:
        scheme = self._scheme
        if self.packed is not None:
            return scheme.packed_linear(x, self.packed, self.bias)
        pieces = [
            scheme.packed_linear(x, Matrix((part,))) if isinstance(part, Packed) else scheme.linear(x, part)
            for part in self.parts.values()
        ]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        return out if self.bias is None else out + self.bias

    def take(self, index: Tensor) -> Tensor:
        """Of a matrix in one part."""
        (part,) = self.parts.values()
        if isinstance(part, Packed):
            return self._scheme.packed_rows(index, part, self._scheme.dtype)
        return nn.functional.embedding(index, part)

    def whole(self) -> Matrix | Tensor:
        if self.packed is not None:
            return self.packed
        dtype = self._scheme.dtype
        return torch.cat([unpack(part, dtype) if isinstance(part, Packed) else part for part in self.parts.values()])


class PartTarget(WeightTarget):
    takes_codes = True

    def __init__(self, matrix: PackedMatrix, part: str, shape: tuple[int, int]) -> None:
        self._matrix, self._part, self.shape = matrix, part, shape

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        self._matrix.keep(self._part, source)


class PackedChoice:
    """Packed, but plain where layers read the numbers."""

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels, kind: str | None) -> None:
        self._plain, self._packed = PlainScheme(dtype, arena, kernels), PackedScheme(dtype, arena, kernels, kind)
        self._outer = PackedScheme(dtype, arena, kernels, "Q8Z") if kind == "Q4M" else self._packed
        self._experts = Separate(self._packed, kernels)

    def of_matrix(self, name: str) -> WeightScheme:
        last = name.rpartition(".")[2]
        return self._plain if last in PLAIN_NAMES else self._outer if last in OUTER_NAMES else self._packed

    def of_experts(self, name: str) -> ExpertScheme:
        return self._experts

    def keeps_blocks(self, type_id: int) -> bool:
        return self._packed.packs(type_id)
