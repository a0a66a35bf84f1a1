"""Experts of a mixture whose matrices are codes of 8 or 4 bits: the form that lies in memory, and the op that runs it.

    number = (value of the code - zero) * scale of its block * scale of its row

Codes of 4 bits lie in chunks of CHUNK columns, the width padded to whole chunks: byte j of a chunk has column j in its
low half and column j + CHUNK / 2 in its high half, so that a kernel multiplies each half with neighbouring columns of
its input. Must not know: checkpoints, modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.moe import sum_experts
from quire.ops.op import op

if TYPE_CHECKING:
    from quire.ops.mx_experts import MxCodes

CHUNK = 128  # columns
HALF = CHUNK // 2
FORMS = ("e4m3", "e2m1", "int4")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class ExpertCodes:
    """Matrices [experts, rows, width] as codes."""

    form: str  # one of FORMS; int4: whole numbers 0 to 15
    codes: Tensor  # e4m3: float8 [experts, rows, width]; else uint8 [experts, rows, padded width / 2]
    width: int
    scale: Tensor | None = None  # [experts, blocks of rows, blocks of columns]: floats, or uint8 that are powers of two
    block: tuple[int, int] = (1, 0)  # rows and columns that share a scale (and a zero)
    zero: Tensor | None = (
        None  # uint8 or float32 (may lie between two codes), as `scale`; None: 8 for int4, 0 for others
    )
    row_scale: Tensor | None = None  # float32 [experts, rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.codes.shape[0], self.codes.shape[1], self.width

    def numbers(self, expert: int, start: int = 0, stop: int | None = None) -> Tensor:
        """float32 [rows, width] of one expert, or some of its rows; `start` is the first of a block."""
        values = self._values(self.codes[expert, start:stop])
        if self.form == "int4":
            values = values - (8.0 if self.zero is None else self._spread(self.zero[expert].float(), values, start))
        if self.scale is not None:
            values = values * self._spread(as_float(self.scale[expert]), values, start)
        if self.row_scale is not None:
            values = values * self.row_scale[expert, start:stop, None]
        return values[:, : self.width]

    def _values(self, codes: Tensor) -> Tensor:
        if self.form == "e4m3":
            return codes.float()
        opened = open_chunks(codes)
        if self.form == "int4":
            return opened.float()
        table = torch.tensor([*E2M1, *(-n for n in E2M1)], device=codes.device)
        return table[opened.long()]

    def _spread(self, grid: Tensor, values: Tensor, start: int) -> Tensor:
        rows, columns = self.block
        grid = grid[start // rows : -(-(start + len(values)) // rows)]
        return grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: values.shape[0], : values.shape[1]]


def padded(width: int) -> int:
    return -(-width // CHUNK) * CHUNK


def close_chunks(codes: Tensor) -> Tensor:
    """uint8 [rows, width], one code of 4 bits in each -> [rows, padded width / 2]."""
    rows, width = codes.shape
    whole = codes if width % CHUNK == 0 else torch.nn.functional.pad(codes, (0, padded(width) - width))
    low, high = whole.view(rows, -1, 2, HALF).unbind(2)
    return (low | high << 4).reshape(rows, -1)


def open_chunks(packed: Tensor) -> Tensor:
    """The reverse, with the padding."""
    chunks = packed.unflatten(-1, (-1, HALF))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3)


def as_float(scale: Tensor) -> Tensor:
    """Bytes are exponents (e8m0), of which the kernels read 0 as 1."""
    if scale.dtype is not torch.uint8:
        return scale.float()
    return (scale.int().clamp(min=1) << 23).view(torch.float32)


@op
def run_coded_experts(
    x: Tensor,  # [T, dim]
    weights: Tensor,  # [T, k]
    index: Tensor,  # [T, k]
    up: ExpertCodes | MxCodes | Tensor,  # gate rows, then up rows
    down: ExpertCodes | MxCodes | Tensor,
    *,
    b1: Tensor | None,
    b2: Tensor | None,
    act: Callable[[Tensor], Tensor],  # [n, 2 * ffn] -> [n, ffn]
    stream: Tensor | None = None,  # [T, dim]
    all_experts: int = 0,
    matmul: Callable[..., Tensor] | None = None,
) -> Tensor:  # [T, dim]
    """As `run_experts`, with matrices that are codes, decoded one expert at a time."""
    matmul = matmul or linear.on(x.device)

    def multiply(rows: Tensor, side: ExpertCodes | MxCodes | Tensor, expert: int, biases: Tensor | None) -> Tensor:
        numbers = side[expert] if isinstance(side, Tensor) else side.numbers(expert).to(rows.dtype)
        return matmul(rows, numbers, None if biases is None else biases[expert])

    def expert_of(rows: Tensor, expert: int) -> Tensor:
        return multiply(act(multiply(rows, up, expert, b1)), down, expert, b2)

    return sum_experts(x, weights, index, up.shape[0], expert_of, stream)


@op
def coded_forms() -> frozenset[str]:
    """The forms of codes that this device's kernels multiply."""
    return frozenset()
