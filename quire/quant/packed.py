"""PackedScheme: matrices kept in the blocks a GGUF file stores, or rounded to such blocks while they are loaded.

Each part of a fused matrix (q, k, v) has a kind of its own, because a file may store them differently; what arrives as
plain numbers and is not to be rounded, or has a shape that blocks do not fit, stays plain. Parts all packed are one
product. Must not know: which model a matrix belongs to, or where its blocks come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.ops.linear import linear
from quire.ops.packed import BLOCK, Matrix, Packed, kind_of, pack, pack_numbers, packed_linear, packed_rows
from quire.quant.arena import Arena
from quire.quant.scheme import Plain, StoredRows, TakesBlocks, new_parameter

Part = Packed | Tensor
PLAIN_NAMES = ("kv_b_proj", "gate", "shared_expert_gate")  # last names of matrices whose numbers layers read themselves
OUTER_NAMES = ("embed_tokens", "lm_head")  # 8 bits where others are rounded to 4, which they bear worst


class PackedScheme:
    name = "packed"

    def __init__(self, dtype: torch.dtype, arena: Arena, kind: str | None = None) -> None:
        """`kind`: what plain numbers are rounded to; None leaves them plain."""
        self.dtype, self.arena, self.kind = dtype, arena, kind
        self._linear, self._packed = linear.on(arena.device), packed_linear.on(arena.device)
        self._rows = packed_rows.on(arena.device)

    def create(self, layer: nn.Module, in_size: int, out_size: int, *, bias: bool) -> None:
        holder: Any = layer
        holder.in_width, holder.out_rows = in_size, out_size
        holder.parts_of, holder.order, holder.matrix = {}, ("",), None  # name of a part -> Part; "" is the whole
        layer.register_parameter("bias", new_parameter((out_size,), self.dtype, self.arena) if bias else None)

    def slots(self, layer: nn.Module, parts: Mapping[str, int]) -> Iterator[tuple[str, str, Tensor]]:
        holder: Any = layer
        width, bias = holder.in_width, holder.bias
        holder.order = tuple(parts)
        for (part, rows), end in zip(parts.items(), accumulate(parts.values()), strict=True):
            yield part, "weight", cast(Tensor, Place(self, layer, part, (rows, width)))
            if bias is not None:
                yield part, "bias", bias.data[end - rows : end]
        if len(parts) > 1:
            whole = (sum(parts.values()), width)
            yield "", "weight", cast(Tensor, Place(self, layer, "", whole))
            if bias is not None:
                yield "", "bias", bias.data

    def keep(self, layer: Any, part: str, given: Tensor | StoredRows) -> None:
        """One part arrived, perhaps while another thread brings the next."""
        self.put(layer, part, self._kept(given))

    def put(self, layer: Any, part: str, kept: Part) -> None:
        """A part as it is to be stored. The whole replaces parts, and they it."""
        for name in () if layer.order == ("",) else ("",) if part else layer.order:
            layer.parts_of.pop(name, None)
        layer.parts_of[part], layer.matrix = kept, None
        numbers = kept.data if isinstance(kept, Packed) else kept
        layer.register_parameter(f"weight_{part}" if part else "weight", nn.Parameter(numbers, requires_grad=False))

    def _kept(self, given: Tensor | StoredRows) -> Part:
        if isinstance(given, StoredRows):
            if kind_of.on("cpu")(given.type_id) is not None:
                return pack.on("cpu")(given.raw, given.type_id, *given.shape)
            given = given.numbers()
        if self.kind is not None and given.dim() == 2 and given.shape[1] % BLOCK == 0:
            return pack_numbers.on("cpu")(given, self.kind)
        kept = self.arena.empty(tuple(given.shape), self.dtype)
        kept.copy_(given)
        return kept

    def finish(self, layer: nn.Module) -> None:
        holder: Any = layer
        held = holder.parts_of
        holder.parts_of = {name: held[name] for name in ("", *holder.order) if name in held}
        parts = tuple(holder.parts_of.values())
        if parts and all(isinstance(part, Packed) for part in parts):
            holder.matrix = Matrix(parts)

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        if layer.matrix is not None:
            return self._packed(x, layer.matrix, layer.bias)
        pieces = []
        for part in layer.parts_of.values():
            packed = isinstance(part, Packed)
            pieces.append(self._packed(x, Matrix((part,))) if packed else self._linear(x, part))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        return out if layer.bias is None else out + layer.bias

    def rows(self, layer: Any, index: Tensor) -> Tensor:
        """Of a matrix in one part."""
        (part,) = layer.parts_of.values()
        if isinstance(part, Packed):
            return self._rows(index, part, self.dtype)
        return nn.functional.embedding(index, part)


class Place(TakesBlocks):
    def __init__(self, scheme: PackedScheme, layer: nn.Module, part: str, shape: tuple[int, int]) -> None:
        self._scheme, self._layer, self._part, self.shape = scheme, layer, part, shape

    def copy_(self, given: Tensor | StoredRows) -> None:
        self._scheme.keep(self._layer, self._part, given)


class Schemes:
    """Which scheme a matrix gets: packed, but plain where layers read its numbers."""

    def __init__(self, dtype: torch.dtype, arena: Arena, kind: str | None) -> None:
        self._plain, self._packed = Plain(dtype, arena), PackedScheme(dtype, arena, kind)
        self._outer = PackedScheme(dtype, arena, "Q8Z") if kind == "Q4M" else self._packed

    def __call__(self, name: str) -> Plain | PackedScheme:
        last = name.rpartition(".")[2]
        return self._plain if last in PLAIN_NAMES else self._outer if last in OUTER_NAMES else self._packed


def num_numbers(model: Any) -> int:
    """How many numbers a model's parameters stand for: a packed matrix counts those it holds; tied ones count once."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    held = [part for module in modules for part in vars(module).get("parts_of", {}).values()]
    packed = {part.data.data_ptr(): part.rows * part.width for part in held if isinstance(part, Packed)}
    own = {id(p): p for _, p in model.named_parameters()}.values()
    return sum(packed.get(p.data_ptr(), p.numel()) for p in own)
