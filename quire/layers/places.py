"""Where an adapter can add something: the layers of a model by the names that checkpoints have for them.

In: a model with a weight table. Out: for a module's name in an adapter file, its place: a run of rows of a Linear or of
the head, the table of the embedding, one matrix of one expert, or that matrix of all experts at once; modules of other
pipeline stages lie elsewhere. B of a fused matrix is brought into the layout that the table gives the weight itself; of
A and B a rank takes what belongs to its part of the matrix, and where ranks divide both (`AdapterShards`), its share of
the other half. Must not know: files, slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from quire.layers.adapters import ExpertAdapters, HeadAdapters, LinearAdapters, StepAdapters, TableAdapters
from quire.layers.embed import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.table import WeightTable
from quire.ops.lora import LowRankPiece, TablePiece
from quire.ops.lora_shards import AdapterShards
from quire.ops.op import Kernels
from quire.quant.scheme import MatrixShape, PlainMatrix
from quire.quant.shard import Cut, cut_to

AdaptedLayer: TypeAlias = Linear | Experts | Embedding | Head
_CHUNK = 1 << 14  # rows of a table that are compared at once


@dataclass(frozen=True)
class AdapterPlace:
    """Rows [start, stop) of a layer's matrix. `rows` and `width` are those of the checkpoint, of which the layer may
    have a part."""

    name: str  # canonical
    layer: AdaptedLayer
    start: int
    stop: int
    rows: int
    width: int
    cut_rows: Cut | None = None  # of B [rows, rank]; None: this rank has all rows
    cut_width: Cut | None = None  # of A [rank, width]
    expert: int = -1  # of a mixture's experts; -1: not one of them
    is_down: bool = False  # the experts' second matrix
    experts: int = 1  # more: the matrices of all experts, one behind another
    shards: AdapterShards | None = None  # None: this rank has all of A, or of B, that is not cut with the matrix

    def own_rows(self, b: Tensor) -> Tensor:
        """Of B [..., rows, rank], what belongs to the rows of this rank."""
        return b if self.cut_rows is None else self.cut_rows.behind(b.dim() - 2).of(b)

    def own_width(self, a: Tensor) -> Tensor:
        """Of A [..., rank, width], what belongs to the entries of this rank."""
        return a if self.cut_width is None else self.cut_width.behind(a.dim() - 2).of(a)

    def own_share(self, piece: LowRankPiece) -> LowRankPiece:
        """Of the half that is not cut with the matrix. Beside columns of A, some rows of B: those of the results that
        this rank adds to before results are summed. Beside rows of B, some rows of A."""
        if self.shards is None:
            return piece
        if self.cut_width is not None:
            rows = self.shards.own(len(piece.b))
            start, stop = piece.start + rows.start, piece.start + rows.stop
            return piece._replace(start=start, stop=stop, b=piece.b[rows])
        return piece._replace(a=piece.a[self.shards.own(len(piece.a))])

    def own_columns(self, piece: TablePiece) -> TablePiece:
        """Of an embedding's adapter: its vectors are summed over ranks, and what is added to them with them."""
        if self.shards is None:
            return piece
        columns = self.shards.own(piece.b.shape[1])
        return piece._replace(rows=piece.rows[:, columns], b=piece.b[:, columns])

    def needs_expert(self, expert: int) -> bool:
        """Whether this rank has any use for what is added to an expert."""
        return not isinstance(self.layer, Experts) or self.layer.needs_adapter_of(expert)

    @property
    def is_stack(self) -> bool:
        return isinstance(self.layer, Experts) and self.expert < 0


class AdapterPlaces:
    def __init__(
        self, model: nn.Module, table: WeightTable, *, most: int = 1, ends: int = 0, has_head: bool = True,
        shards: AdapterShards | None = None,  # among which both A and B are cut
    ) -> None:  # fmt: skip
        """Of a pipeline stage, bounds of the whole model: `most` times what is here, and `ends` numbers that copies of
        its embedding and head may have."""
        self._table, self.most, self.ends, self._shards = table, most, ends, shards
        self.by_name: dict[str, AdapterPlace] = {}
        for module in model.modules():
            if isinstance(module, Linear):
                self._add_linear(module)
            elif isinstance(module, Experts):
                self._add_experts(module)
            elif isinstance(module, Embedding):  # its vectors are complete when an adapter adds to them
                self._add(AdapterPlace(module.name, module, 0, module.rows.whole, module.rows.whole, module.width))
            elif isinstance(module, Head) and has_head:
                rows = module.rows
                self._add(AdapterPlace(module.name, module, 0, rows.count, rows.whole, module.width, cut_to(0, [rows])))

    def find(self, module: str) -> AdapterPlace | None:
        """By a module's name as a checkpoint of the model spells it."""
        return self.by_name.get(self.canonical(module))

    def find_parameter(self, name: str) -> AdapterPlace | None:
        """By the name of a parameter that is not called `weight`."""
        return self.by_name.get(self._table.canonical(name))

    @property
    def is_part(self) -> bool:
        """Other stages have other places."""
        return self._table.is_part

    def lies_elsewhere(self, module: str) -> bool:
        """A module of another pipeline stage."""
        return self._table.lies_elsewhere(f"{module}.weight")

    def is_unread(self, module: str) -> bool:
        """A module whose weight no computation reads (keys and values of layers that borrow those of others)."""
        return self._table.is_unread(f"{module}.weight")

    def canonical(self, module: str) -> str:
        return self._table.canonical(f"{module}.weight").removesuffix(".weight")

    def arrange(self, place: AdapterPlace, b: Tensor) -> Tensor:
        """B [rows, rank], whose rows lie as the checkpoint's weight has them, in the layout of the layer's rows."""
        name = f"{place.name}.weight"
        if place.expert >= 0:
            return b
        probe = self._table.arranged(name, torch.empty((place.rows, place.rows + 1), device="meta"))
        is_transposed = probe.shape[0] != place.rows
        return self._table.arranged(name, b.t() if is_transposed else b).contiguous()

    def is_transposed(self, place: AdapterPlace) -> bool:
        """Whether a checkpoint has the matrices of all experts as [experts, width, rows]."""
        probe = torch.empty((1, place.rows, place.rows + 2), device="meta")
        return self._table.arranged(place.name, probe).shape[1] != place.rows

    def arrange_stack(self, place: AdapterPlace, b: Tensor) -> Tensor:
        """The same as `arrange`, for B [experts, rows, rank] of all experts."""
        b = b.transpose(1, 2) if self.is_transposed(place) else b
        return self._table.arranged(place.name, b).contiguous()

    def is_weight_of(self, place: AdapterPlace, weight: Tensor) -> bool:
        """Whether these numbers, as a checkpoint has them, are those of an embedding or a head; of a matrix that was
        rounded when it was stored: nearly."""
        layer = place.layer
        assert isinstance(layer, Embedding | Head)
        stored, weight = layer.stored, self._table.arranged(f"{place.name}.weight", weight)
        is_exact = isinstance(stored, PlainMatrix)
        device = next(parameter.device for _, parameter in stored.parameters())
        first, count = layer.rows.start, layer.rows.count
        for start in range(0, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            ours = stored.take(torch.arange(start, stop, device=device)).cpu()
            theirs = weight[first + start : first + stop].to(ours.dtype)
            if not torch.equal(ours, theirs) and (is_exact or not _is_near(ours.float(), theirs.float())):
                return False
        return True

    def _add(self, place: AdapterPlace) -> None:
        self.by_name[place.name] = replace(place, shards=shards_of(place.layer, self._shards))

    def _add_linear(self, layer: Linear) -> None:
        shape = layer.stored.shape
        for name, run in layer.named_runs():
            self._add(_place_of(layer.prefix + name, layer, shape, run))

    def _add_experts(self, layer: Experts) -> None:
        shape = layer.stored.shape
        for name, matrix, is_down in zip((shape.fused, "down_proj"), shape.matrices(), (False, True), strict=True):
            every = _place_of(layer.prefix + name, layer, matrix, tuple(matrix.parts))
            self._add(replace(every, is_down=is_down, experts=layer.count))
            for part in matrix.parts:
                place = replace(_place_of("", layer, matrix, (part,)), is_down=is_down)
                for expert in range(layer.count):
                    self._add(replace(place, name=f"{layer.prefix}{expert}.{part}", expert=expert))


def _place_of(name: str, layer: AdaptedLayer, shape: MatrixShape, run: tuple[str, ...]) -> AdapterPlace:
    """Parts of a matrix that follow each other."""
    spans = [shape.parts[part] for part in run]
    return AdapterPlace(
        name, layer, *shape.rows_of(run), sum(span.whole for span in spans), shape.width.whole, cut_to(0, spans),
        cut_to(1, [shape.width]),
    )  # fmt: skip


def shards_of(layer: AdaptedLayer, shards: AdapterShards | None) -> AdapterShards | None:
    """The ranks that divide both halves of a layer's adapters: those that its matrix is cut among. None: it is whole,
    as experts of expert parallelism are, or adapters are merged into a copy of it."""
    if isinstance(layer, Linear):
        shape = layer.stored.shape
        is_cut = not all(span.is_whole for span in (shape.width, *shape.parts.values())) and not layer.absorbed
    elif isinstance(layer, Experts):
        is_cut = not layer.stored.shape.ffn.is_whole
    else:
        is_cut = not layer.rows.is_whole
    return shards if is_cut else None


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    """Four bits per number leave less than a fifth of difference."""
    return bool((ours - theirs).norm() <= 0.2 * theirs.norm())


def attach(
    model: nn.Module, step: StepAdapters, num_slots: int, rank: int, like: Tensor, kernels: Kernels,
    shards: AdapterShards | None = None,
) -> list[AdaptedLayer]:  # fmt: skip
    """Give every layer its slots; all layers that have some. `like`: a tensor of the adapters' dtype, on the model's
    device. `shards`: as AdapterPlaces has them."""
    layers: list[AdaptedLayer] = []
    for module in model.modules():
        if not isinstance(module, Linear | Experts | Embedding | Head):
            continue
        own = shards_of(module, shards)
        if isinstance(module, Linear):
            module.adapters = LinearAdapters(module, step, num_slots, rank, like, kernels, own)
        elif isinstance(module, Experts):
            module.adapters = ExpertAdapters(module.stored, step, num_slots, kernels, own, module.share, module.spread)
        elif isinstance(module, Embedding):
            module.adapters = TableAdapters(step, num_slots, kernels, own)
        else:
            module.adapters = HeadAdapters(num_slots, kernels, own)
        layers.append(module)
    return layers
