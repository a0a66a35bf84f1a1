"""CodedScheme: matrices kept on a device as the codes of a checkpoint, or rounded to such codes while they are loaded.

What arrives for a part (q of q, k and v) decides how it is kept: codes that kernels take stay codes; others are decoded
to 16 bits, and so are plain numbers unless the scheme rounds them. Parts that are coded alike become one matrix as soon
as all are there. Numbers are sent and rounded some rows at a time, by one thread at a time, so at no time is more in a
device's memory than the codes, a few rows in every thread that loads, and one matrix that is being joined. Must not
know: which model a matrix belongs to, or where its codes come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock

import torch
from torch import Tensor, nn

from quire.ops.coded import CodedWeight, coded_linear, decode_rows, decode_weight
from quire.ops.linear import linear
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.coded import CodedMatrix
from quire.quant.device_codes import device_codes, empty_like, join, put_rows
from quire.quant.experts import ExpertScheme, Stacked
from quire.quant.packed import OUTER_NAMES, PLAIN_NAMES
from quire.quant.scheme import (
    MatrixShape,
    PartSlot,
    PlainScheme,
    RunTarget,
    Send,
    StoredMatrix,
    WeightScheme,
    WeightTarget,
    by_rows,
    new_parameter,
)
from quire.schema.errors import ConfigError

Coder = Callable[[Tensor], CodedWeight | CodedMatrix | Tensor]  # numbers -> what they are rounded to, where they can be
CodedPart = CodedWeight | Tensor
_PLAIN = frozenset((*PLAIN_NAMES, "embed_positions", "embed_types"))


class CodedScheme:
    name = "coded"

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels, coder: Coder | None = None) -> None:
        """`coder`: what plain numbers are rounded with; None leaves them plain."""
        self.dtype, self.arena, self._coder = dtype, arena, coder
        self.working = Lock()  # of whoever needs memory of the device for a moment
        self.linear, self.coded_linear = kernels.of(linear), kernels.of(coded_linear)
        self.decode, self.decode_rows = kernels.of(decode_weight), kernels.of(decode_rows)

    def create(self, shape: MatrixShape) -> CodedParts:
        return CodedParts(shape, self)

    def stored_form(self, part: Tensor | CodedMatrix, send: Send | None = None) -> CodedPart:
        """A part as it is to be stored. `send` brings it to the device; None: it is there."""
        if isinstance(part, Tensor) and part.dim() == 2 and self._coder is not None:
            made = self._by_rows(part, send)
            if made is not None:
                return made
        return self._form_of(part if send is None else send(part))

    def _by_rows(self, numbers: Tensor, send: Send | None) -> CodedPart | None:
        """Rounded some rows at a time; None: these cannot lie in one matrix."""
        whole: CodedPart | None = None
        for start, rows in by_rows(numbers):
            sent = rows if send is None else send(rows)
            with self.working:
                made = self._form_of(sent)
                if rows is numbers:
                    return made
                if whole is None:
                    count = len(numbers)
                    whole = empty_like(made, count) if isinstance(made, CodedWeight) else self._empty(count, made)
                if not put(whole, start, made):
                    return None
        return whole

    def _empty(self, rows: int, like: Tensor) -> Tensor:
        return self.arena.empty((rows, *like.shape[1:]), self.dtype)

    def _form_of(self, part: Tensor | CodedMatrix) -> CodedPart:
        if isinstance(part, Tensor) and part.dim() == 2 and self._coder is not None:
            made = self._coder(part.to(self.arena.device))
            if isinstance(made, CodedWeight):
                return made
            part = made
        if isinstance(part, CodedMatrix):
            codes = device_codes(part)
            if codes is not None:
                return codes
            part = part.numbers()
        plain = self.arena.empty(tuple(part.shape), self.dtype)
        plain.copy_(part)
        return plain


class CodedParts(StoredMatrix):
    name = "coded"
    may_be_few = True

    def __init__(self, shape: MatrixShape, scheme: CodedScheme) -> None:
        self.shape, self._scheme, self._lock = shape, scheme, Lock()
        self.parts: dict[str, CodedPart] = {}  # by name; "" is the whole
        self._weights: dict[str, nn.Parameter] = {}
        self._finished = False
        self.bias = new_parameter((shape.rows,), scheme.dtype, scheme.arena) if shape.has_bias else None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()
        if self.bias is not None:
            yield "bias", self.bias

    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        is_all = len(run) > 1 and run == tuple(self.shape.parts)
        parts = [CodedTarget(self, "" if is_all else name, self._size(run if is_all else (name,))) for name in run]
        target = parts[0] if is_all or len(run) == 1 else RunTarget(parts)
        yield PartSlot("weight", target, self.shape.cut_of(run))
        yield from self._bias_slots(run)

    def _size(self, run: tuple[str, ...]) -> tuple[int, int]:
        start, stop = self.shape.rows_of(run)
        return stop - start, self.shape.width.count

    def keep(self, name: str, part: Tensor | CodedMatrix, send: Send | None = None) -> None:
        """One part arrived, perhaps while another thread brings the next. The whole replaces parts, and they it.
        `send` brings it to the device; None: it is there."""
        stored = self._scheme.stored_form(part, send)
        with self._lock:
            if self._finished:
                self._write(name, stored)
                return
            if not name or "" in self.parts:
                self.parts.clear()
            self.parts[name] = stored
            with self._scheme.working:
                self._join()
            self._weights = dict(self._named())

    def _write(self, name: str, part: CodedPart) -> None:
        """Into the memory of what was there before: graphs that were captured read it."""
        where = "" if "" in self.parts else name
        start = self.shape.rows_of((name,))[0] if name and not where else 0
        whole = self.parts.get(where)
        if whole is None or not put(whole, start, part):
            raise ConfigError("weights that replace others must be coded as those were", param="quantization")

    def finish(self) -> None:
        self._finished = bool(self.parts)

    def fill(self, prefix: str, draw: Callable[[str, Tensor], None]) -> None:
        """With numbers that are not from a checkpoint: `draw` writes those of a name into a flat tensor."""
        for name, rows in self.shape.parts.items():
            width = self.shape.width.count
            numbers = torch.empty(rows.count * width, dtype=self._scheme.dtype, device=self._scheme.arena.device)
            draw(f"{prefix}.{name}", numbers)
            self.keep(name, numbers.view(rows.count, width))

    def _join(self) -> None:
        """All parts are there: one matrix, where they are alike."""
        names = tuple(self.shape.parts)
        if len(names) == 1 or any(name not in self.parts for name in names):
            return
        parts = [self.parts[name] for name in names]
        coded, plain = [p for p in parts if isinstance(p, CodedWeight)], [p for p in parts if isinstance(p, Tensor)]
        whole: CodedPart | None = torch.cat(plain) if not coded else None if plain else join(coded)
        self.parts = dict(zip(names, parts, strict=True)) if whole is None else {"": whole}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, part in self.parts.items():
            tail = f"_{name}" if name else ""
            tensors = part.tensors() if isinstance(part, CodedWeight) else {"weight": part}
            for leaf, tensor in tensors.items():
                yield leaf + tail, nn.Parameter(tensor, requires_grad=False)

    def coded(self) -> Sequence[CodedWeight]:
        return [part for part in self.parts.values() if isinstance(part, CodedWeight)]

    def few_form(self) -> Tensor | CodedWeight | None:
        if len(self.parts) != 1:
            return None
        (part,) = self.parts.values()
        return part

    def few_parts(self) -> Sequence[Tensor | CodedWeight]:
        return tuple(self.parts.values())

    def multiply(self, x: Tensor) -> Tensor:
        return self.multiply_with(x, self.bias)

    def multiply_with(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            return self._times(x, part, bias)
        y = torch.cat([self._times(x, part, None) for part in self.parts.values()], -1)
        return y if bias is None else y + bias

    def _times(self, x: Tensor, part: CodedPart, bias: Tensor | None) -> Tensor:
        scheme = self._scheme
        return scheme.linear(x, part, bias) if isinstance(part, Tensor) else scheme.coded_linear(x, part, bias)

    def take(self, index: Tensor) -> Tensor:
        """Of a matrix in one part."""
        (part,) = self.parts.values()
        if isinstance(part, CodedWeight):
            return self._scheme.decode_rows(part, index, self._scheme.dtype)
        return nn.functional.embedding(index, part)

    def decoded(self) -> Tensor:
        """[rows, width] in the model's dtype."""
        scheme = self._scheme
        parts = [p if isinstance(p, Tensor) else scheme.decode(p, scheme.dtype) for p in self.parts.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def put(whole: CodedPart, start: int, part: CodedPart) -> bool:
    """Write some rows of a matrix where they lie; False: it is stored in another form."""
    if isinstance(whole, CodedWeight) and isinstance(part, CodedWeight):
        return put_rows(whole, start, part)
    if isinstance(whole, CodedWeight) or isinstance(part, CodedWeight):
        return False
    whole[start : start + len(part)].copy_(part)
    return True


class CodedTarget(WeightTarget):
    takes_codes = True

    def __init__(self, matrix: CodedParts, part: str, shape: tuple[int, int]) -> None:
        self._matrix, self._part, self.shape = matrix, part, shape

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        self._matrix.keep(self._part, source)

    def copy_sent(self, source: Tensor | CodedMatrix, send: Send) -> None:
        self._matrix.keep(self._part, source, send)


class CodedChoice:
    """Codes, but plain numbers for what layers read themselves; and, unless `outer` says otherwise, for embeddings and
    heads (unless they have a scheme)."""

    def __init__(
        self,
        dtype: torch.dtype,
        arena: Arena,
        kernels: Kernels,
        matrices: WeightScheme | None = None,  # None: plain numbers
        experts: ExpertScheme | None = None,  # None: plain numbers
        head: WeightScheme | None = None,  # None: as other matrices if `outer`, else plain numbers
        *,
        outer: bool = False,
    ) -> None:
        self._plain = PlainScheme(dtype, arena, kernels)
        self._coded, self._head = matrices or self._plain, head
        self._experts = experts or Stacked(dtype, arena, kernels)
        self._names = _PLAIN if outer else _PLAIN.union(OUTER_NAMES)

    def of_matrix(self, name: str) -> WeightScheme:
        last = name.rpartition(".")[2]
        if last == "lm_head" and self._head is not None:
            return self._head
        return self._plain if last in self._names else self._coded

    def of_experts(self, name: str) -> ExpertScheme:
        return self._experts

    def keeps_blocks(self, type_id: int) -> bool:
        return self._coded is not self._plain
