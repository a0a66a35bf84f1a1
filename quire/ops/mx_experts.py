"""MxCodes: experts in MXFP4 as the kernel for Hopper (ops/triton/moe_mx.py) reads them; 4.25 bits a number.

    a tile: 16 rows, whose first and second eights alternate in memory; a unit: 64 columns, two blocks with a scale each
    codes [experts, tiles, units, 8 rows, 4 threads, 2 eights, 2 blocks]: words of 8 codes
    scale [experts, tiles, units, 8 rows]: bytes of 2 eights and 2 blocks

A word has columns 2 t and 2 t + 1 (of thread t), and those 8, 16 and 24 further, one of a pair in each half. `_PLACES`
says where in 16 bits: such that one AND, after a shift, leaves sign, exponent and mantissa of a code in the places of
bfloat16's, 2^126 too small. What a scale's byte has more makes up for that, but for 2^64, which the kernel multiplies
its results with. So numbers are exact for scales from 2^-61 to 2^65; a matrix with others has another form.
In matrices of gates and ups an eight of gates shares a tile with its ups, so that a thread has both.
Must not know: checkpoints, modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.coded_experts import E2M1, as_float
from quire.ops.op import op

UNIT = 64  # columns that the kernel decodes at once
BLOCK = 32  # columns that share a scale
_LEAST, _MOST = 66, 192  # bytes of scales whose numbers are exact
_LIFT = 62  # what a stored byte has more, modulo 256: 126 for the codes, less 64

# Where the four codes of 16 bits have sign, exponent (two bits) and mantissa.
_PLACES = ((15, 8, 7, 6), (9, 2, 1, 0), (11, 10, 14, 13), (12, 5, 4, 3))


@dataclass(frozen=True)
class MxCodes:
    """Matrices [experts, rows, width]; rows a multiple of 16, width of UNIT."""

    codes: Tensor  # int32 [experts, rows / 16, width / 64, 128]
    scale: Tensor  # int32 [experts, rows / 16, width / 64, 8]
    rows: int
    width: int
    gated: bool  # rows are gates, then as many ups
    form: str = "e2m1"
    block: tuple[int, int] = (1, BLOCK)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.codes.shape[0], self.rows, self.width

    def put(self, expert: int, start: int, codes: Tensor, scale: Tensor) -> Tensor:
        """Rows of one expert from `start` on, whole eights: uint8 [rows, width], one code in each, and exponents [rows,
        width / 32]. Returns whether the kernel decodes them exactly, on their device."""
        tile, eight = self._eights(start, start + len(codes))
        self._words(expert)[tile, :, :, :, eight] = _pack(codes)
        lifted = (scale + _LIFT).unflatten(0, (-1, 8)).unflatten(2, (-1, 2))  # bytes wrap around
        self._bytes(expert)[tile, :, :, eight] = lifted.transpose(1, 2)
        counts = (codes & 7).unflatten(1, (-1, BLOCK)).amax(2) > 0  # a block of zeros may have any small scale
        return ~((scale > _MOST) | (scale < _LEAST) & counts).any()

    def opened(self, expert: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """What was put: codes and exponents of some rows of one expert."""
        stop = self.rows if stop is None else min(stop, self.rows)
        tile, eight = self._eights(start, stop)
        codes = _unpack(self._words(expert)[tile, :, :, :, eight])
        scale = self._bytes(expert)[tile, :, :, eight].transpose(1, 2).flatten(2).flatten(0, 1) - _LIFT
        kept = slice(start % 8, start % 8 + stop - start)
        return codes[kept], scale[kept]

    def numbers(self, expert: int, start: int = 0, stop: int | None = None) -> Tensor:
        """As ExpertCodes.numbers."""
        codes, scale = self.opened(expert, start, stop)
        table = torch.tensor([*E2M1, *(-n for n in E2M1)], device=codes.device)
        return (table[codes.long()].unflatten(1, (-1, BLOCK)) * as_float(scale)[:, :, None]).flatten(1)

    def fill(self, ring: Tensor, exponent: int) -> None:
        """All bytes of codes from a repeated sequence, which may be any, and one scale."""
        flat = self.codes.view(torch.uint8).view(-1)
        for start in range(0, flat.numel(), len(ring)):
            part = flat[start : start + len(ring)]
            part.copy_(ring[: len(part)])
        self.scale.view(torch.uint8).fill_((exponent + _LIFT) % 256)

    def _words(self, expert: int) -> Tensor:
        """Of tiles, units, rows, threads, eights, blocks."""
        return self.codes[expert].unflatten(2, (8, 4, 2, 2))

    def _bytes(self, expert: int) -> Tensor:
        """Of tiles, units, rows, eights, blocks."""
        return self.scale[expert].view(torch.uint8).unflatten(2, (8, 2, 2))

    def _eights(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the eights that have rows from start to stop: tile, and place in it."""
        at = torch.arange(start // 8, -(-stop // 8), device=self.codes.device)
        tiles = self.rows // 16
        return (at % tiles, at // tiles) if self.gated else (at // 2, at % 2)


def _pack(codes: Tensor) -> Tensor:
    """uint8 [rows, width] -> [rows / 8, units, 8, 4, 2]."""
    table = torch.tensor([[_placed(code, pair) for code in range(16)] for pair in range(4)], dtype=torch.int32)
    both = (table[:, None, :] | table[:, :, None] << 16).flatten(1).to(codes.device)  # by the bytes of two columns
    # block, pair, thread, column of the pair
    split = codes.unflatten(0, (-1, 8)).unflatten(2, (-1, 2, 4, 4, 2))
    pairs = (split[..., 0] | split[..., 1] << 4).int()
    words = both[0][pairs[:, :, :, :, 0]]
    for pair in range(1, 4):
        words |= both[pair][pairs[:, :, :, :, pair]]
    return words.permute(0, 2, 1, 4, 3)


def _placed(code: int, pair: int) -> int:
    return sum((code >> (3 - bit) & 1) << at for bit, at in enumerate(_PLACES[pair]))


def _unpack(words: Tensor) -> Tensor:
    """The reverse."""
    found = []
    for places in _PLACES:
        for half in (0, 16):
            bits = [(words >> (half + at) & 1) << (3 - bit) for bit, at in enumerate(places)]
            found.append((bits[0] | bits[1] | bits[2] | bits[3]).to(torch.uint8))
    # eights, units, rows, threads, blocks, pairs, columns of a pair
    split = torch.stack(found, -1).unflatten(-1, (4, 2))
    return split.permute(0, 2, 1, 4, 5, 3, 6).flatten(2).flatten(0, 1)


def shapes_of(experts: int, rows: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the tensors of MxCodes: codes and scale."""
    tiles = experts, rows // 16, width // UNIT
    return (*tiles, 128), (*tiles, 8)


@op
def multiplies_mx(dtype: torch.dtype, width: int, ffn: int, act: Callable[[Tensor], Tensor]) -> bool:
    """Whether `run_coded_experts` of this device takes MxCodes of gated experts, and is faster with them."""
    return False
