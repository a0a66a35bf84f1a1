"""StoredExperts: the matrices of all experts of a mixture, in the form that one kind of kernel wants them.

`StackedExperts` are plain numbers in two tensors, which grouped kernels read, and compiled CPU kernels one by one.
`SeparateExperts` are matrices of their own, as a weight scheme stores them. (Codes that grouped kernels read:
coded_experts.py.) All fill from one tensor per expert or
from tensors that hold all of them. Must not know: routers, which model they belong to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.ops.linear import linear
from quire.ops.moe import Mixture, run_experts, run_mixture
from quire.ops.op import Kernels
from quire.ops.parts import PartialSums, whole
from quire.quant.arena import Arena
from quire.quant.coded import CodedMatrix
from quire.quant.scheme import (
    MatrixShape,
    PartSlot,
    Slot,
    StoredMatrix,
    WeightScheme,
    WeightTarget,
    new_parameter,
)
from quire.quant.shard import Span, cut_to

Rule = tuple[str, float, float]  # name of a gated activation, alpha, limit


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture's experts, and what this rank holds: some entries of every expert, or some experts whole."""

    experts: int
    width: int
    ffn: Span
    gated: bool
    bias: bool
    act: Callable[[Tensor], Tensor]  # [n, rows of up] -> [n, ffn]
    rule: Rule | None  # what `act` is, for compiled kernels; None: they have no code for it
    all_experts: int = 0  # of all ranks, copies too, where this one has some of them whole; 0: it has all

    @property
    def ups(self) -> tuple[str, ...]:
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)

    @property
    def fused(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def matrices(self) -> tuple[MatrixShape, MatrixShape]:
        """Of one expert: up and down."""
        up = MatrixShape(dict.fromkeys(self.ups, self.ffn), Span.all(self.width), self.bias)
        return up, MatrixShape({"down_proj": Span.all(self.width)}, self.ffn, self.bias)


class StoredExperts(ABC):
    name: str  # of the scheme
    shape: ExpertShape

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    @abstractmethod
    def slots(self) -> Iterator[Slot]:
        """Named from the experts' numbers on: '3.up_proj.weight', 'down_proj'."""
        ...

    def matrices(self) -> Iterator[tuple[str, StoredMatrix]]:
        """Those that are stored one by one."""
        return iter(())

    def tensors_of(self, place: int) -> list[Tensor]:
        """All that one expert is, as it is stored: copied from one rank to another, it is the same expert there."""
        return [parameter.data[place] for _, parameter in self.parameters()]

    def replace(self, place: int, tensors: Sequence[Tensor]) -> None:
        """Another expert, from its `tensors_of` on another rank, comes to this place."""
        for target, part in zip(self.tensors_of(place), tensors, strict=True):
            target.copy_(part)

    def num_numbers(self) -> dict[str, int]:
        """How many numbers parameters stand for, by their names, where that is not how many they hold."""
        return {}

    def finish(self) -> None:
        return None

    def fill_dummy(self, normal: Tensor) -> None:
        """Codes, and what belongs to them, from a sequence of normal numbers; parameters that hold numbers are filled
        by whoever fills all of a model's."""
        return None

    @abstractmethod
    def multiply_up(self, expert: int, x: Tensor) -> Tensor:
        """One expert's first matmul [n, rows of up], the bias added: where something comes between the matmuls."""
        ...

    @abstractmethod
    def multiply_down(self, expert: int, x: Tensor) -> Tensor: ...

    @abstractmethod
    def multiply(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        """Sum over a token's experts of weight * expert(x), added to `stream`: see ops/moe.py. With `all_experts` of
        the shape, `index` is -1 where an expert is on another rank."""
        ...

    def multiply_in_parts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor | PartialSums:
        """As `multiply`, before a norm that may add up the results of a token's experts."""
        return self.multiply(x, weights, index)


class ExpertScheme(Protocol):
    name: str

    def create(self, shape: ExpertShape) -> StoredExperts: ...


class StackedExperts(StoredExperts):
    """w1 [experts, gate rows then up rows, width], w2 [experts, width, ffn], and their biases."""

    name = "stacked"

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        self.shape = shape
        up, down = shape.matrices()
        count = shape.experts
        self.w1 = new_parameter((count, up.rows, up.width.count), dtype, arena)
        self.w2 = new_parameter((count, down.rows, down.width.count), dtype, arena)
        self.b1 = new_parameter((count, up.rows), dtype, arena) if up.has_bias else None
        self.b2 = new_parameter((count, down.rows), dtype, arena) if down.has_bias else None
        self._run, self._run_mixture = kernels.of(run_experts), kernels.of(run_mixture)
        self._linear = kernels.of(linear)
        # compiled matmuls of 16-bit numbers pay where rows are few, and torch is as good with 32 bits
        self.one_by_one = kernels.device.type == "cpu" and dtype is not torch.float32
        self._mixture: Mixture | None = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in (("w1", self.w1), ("w2", self.w2), ("b1", self.b1), ("b2", self.b2)):
            if parameter is not None:
                yield name, parameter

    def slots(self) -> Iterator[Slot]:
        up, down = self.shape.matrices()
        for leaf, first, second in (("weight", self.w1, self.w2), ("bias", self.b1, self.b2)):
            if leaf == "bias" and not self.shape.bias:
                continue
            yield from self._slots(leaf, self.shape.fused, up, first)
            yield from self._slots(leaf, "down_proj", down, second)

    def _slots(self, leaf: str, fused: str, shape: MatrixShape, stack: nn.Parameter | None) -> Iterator[Slot]:
        names, run = [], tuple(shape.parts)
        for expert in range(self.shape.experts):
            for part in run:
                start, stop = shape.rows_of((part,))
                names.append(f"{expert}.{part}.{leaf}")
                cut = shape.cut_of((part,)) if leaf == "weight" else cut_to(0, [shape.parts[part]])
                yield Slot(names[-1], None if stack is None else stack.data[expert, start:stop], cut=cut)
        whole = shape.cut_of(run) if leaf == "weight" else cut_to(0, [shape.parts[part] for part in run])
        name = fused if leaf == "weight" else f"{fused}_bias"
        yield Slot(
            name, None if stack is None else stack.data, tuple(names), None if whole is None else whole.behind(1)
        )

    def multiply(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        if self.one_by_one:
            return self._run_mixture(x, weights, index, self._matrices(), stream)
        b1, b2, act = self.b1, self.b2, self.shape.act
        every = self.shape.all_experts
        y = self._run(
            x, weights, index, self.w1, self.w2, b1=b1, b2=b2, act=act, stream=stream, all_experts=every
        )  # fmt: skip
        return whole(y)

    def multiply_in_parts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor | PartialSums:
        if self.one_by_one:
            return self.multiply(x, weights, index)
        b1, b2, act = self.b1, self.b2, self.shape.act
        return self._run(x, weights, index, self.w1, self.w2, b1=b1, b2=b2, act=act, in_parts=True)

    def multiply_up(self, expert: int, x: Tensor) -> Tensor:
        return self._linear(x, self.w1[expert], None if self.b1 is None else self.b1[expert])

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        return self._linear(x, self.w2[expert], None if self.b2 is None else self.b2[expert])

    def _matrices(self) -> Mixture:
        """The same numbers as matrices one by one."""
        if self._mixture is None:
            none = (None,) * self.shape.experts
            b1 = none if self.b1 is None else tuple(self.b1.data)
            b2 = none if self.b2 is None else tuple(self.b2.data)
            self._mixture = Mixture(tuple(self.w1.data), tuple(self.w2.data), b1, b2, self.shape.act, self.shape.rule)
        return self._mixture


class Stacked:
    name = "stacked"

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        self._dtype, self._arena, self._kernels = dtype, arena, kernels

    def create(self, shape: ExpertShape) -> StoredExperts:
        return StackedExperts(shape, self._dtype, self._arena, self._kernels)


class SeparateExperts(StoredExperts):
    """Each matrix by itself. The mixture that kernels take is made anew once weights were replaced."""

    def __init__(self, shape: ExpertShape, scheme: WeightScheme, kernels: Kernels) -> None:
        self.shape, self.name = shape, scheme.name
        up, down = shape.matrices()
        self.up = tuple(scheme.create(up) for _ in range(shape.experts))
        self.down = tuple(scheme.create(down) for _ in range(shape.experts))
        self._run_mixture = kernels.of(run_mixture)
        self._mixture: Mixture | None = None

    def matrices(self) -> Iterator[tuple[str, StoredMatrix]]:
        for side, own in (("up", self.up), ("down", self.down)):
            for expert, matrix in enumerate(own):
                yield f"{side}.{expert}", matrix

    def tensors_of(self, place: int) -> list[Tensor]:
        return [parameter.data for side in (self.up, self.down) for _, parameter in side[place].parameters()]

    def replace(self, place: int, tensors: Sequence[Tensor]) -> None:
        super().replace(place, tensors)
        self._mixture = None  # it has copies of what is not packed

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, matrix in self.matrices():
            for leaf, parameter in matrix.parameters():
                yield f"{name.replace('.', '_')}_{leaf}", parameter

    def slots(self) -> Iterator[Slot]:
        for fused, own in ((self.shape.fused, self.up), ("down_proj", self.down)):
            run = tuple(own[0].shape.parts)
            every: dict[str, list[list[PartSlot]]] = {}  # leaf -> places of each expert
            for expert, matrix in enumerate(own):
                for part in run:
                    for slot in matrix.slots((part,)):
                        yield Slot(f"{expert}.{part}.{slot.leaf}", slot.target, cut=slot.cut)
                        places = every.setdefault(slot.leaf, [])
                        places += [[]] if len(places) == expert else []
                        places[expert].append(slot)
            for leaf, places in every.items():
                yield self._of_all(fused, leaf, own[0].shape, places)

    def _of_all(self, fused: str, leaf: str, shape: MatrixShape, places: list[list[PartSlot]]) -> Slot:
        run = tuple(shape.parts)
        names = tuple(f"{expert}.{part}.{leaf}" for expert in range(len(places)) for part in run)
        cut = shape.cut_of(run) if leaf == "weight" else cut_to(0, [shape.parts[part] for part in run])
        targets = [[slot.target for slot in own if slot.target is not None] for own in places]
        target = StackTarget(targets) if targets[0] else None
        name = fused if leaf == "weight" else f"{fused}_bias"
        return Slot(name, target, names, None if cut is None else cut.behind(1))

    def finish(self) -> None:
        for _, matrix in self.matrices():
            matrix.finish()
        self._mixture = None

    def multiply_up(self, expert: int, x: Tensor) -> Tensor:
        return self.up[expert].multiply(x)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert].multiply(x)

    def multiply(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        if self._mixture is None:
            up, down = (tuple(matrix.whole() for matrix in own) for own in (self.up, self.down))
            up_bias, down_bias = (tuple(matrix.bias for matrix in own) for own in (self.up, self.down))
            self._mixture = Mixture(up, down, up_bias, down_bias, self.shape.act, self.shape.rule)
        return self._run_mixture(x, weights, index, self._mixture, stream)


class Separate:
    def __init__(self, scheme: WeightScheme, kernels: Kernels) -> None:
        self.name, self._scheme, self._kernels = scheme.name, scheme, kernels

    def create(self, shape: ExpertShape) -> StoredExperts:
        return SeparateExperts(shape, self._scheme, self._kernels)


class StackTarget(WeightTarget):
    """A place that all experts share: [experts, rows, width], or [experts, rows] of biases."""

    def __init__(self, targets: Sequence[Sequence[Tensor | WeightTarget]]) -> None:
        self._targets = targets  # of each expert: places one under another
        rows = sum(place.shape[0] for place in targets[0])
        self.shape = (len(targets), rows, *targets[0][0].shape[1:])

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        numbers = source.numbers() if isinstance(source, CodedMatrix) else source
        for own, places in zip(numbers, self._targets, strict=True):
            for part, place in zip(own.split([place.shape[0] for place in places]), places, strict=True):
                place.copy_(part)
