"""Step inputs on CUDA: token ids, positions, contexts and cache slots of every entry in one launch per KV group.

Floor: a launch, about 1.4 us inside a graph; 16,384 tokens move under 1 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.op import FormTable
from quire.ops.rows import StepBuffers, gather_inputs
from quire.ops.triton.sizes import cdiv

_BLOCK = 256


@triton.jit(do_not_specialize=["count", "scrap"])
def _gather_kernel(
    rows, positions, tokens, table, token_ids, places, contexts, slots, count, scrap, token_stride, table_stride,
    SIZE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FIRST: also the outputs that do not depend on the group."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + at, mask=inside, other=0)
    real = inside & (row != scrap)
    if FIRST:
        token = tl.load(tokens + row * token_stride + position, mask=inside, other=0)
        tl.store(token_ids + at, token.to(tl.int64), mask=inside)
        tl.store(places + at, position.to(tl.int64), mask=inside)
        tl.store(contexts + at, tl.where(real, position + 1, 0), mask=inside)
    block = tl.load(table + row * table_stride + position // SIZE, mask=real, other=-1).to(tl.int64)
    tl.store(slots + at, tl.where(block >= 0, block * SIZE + position % SIZE, -1), mask=inside)


def gather_inputs_cuda(
    rows: Tensor, positions: Tensor, tokens: Tensor, tables: Sequence[Tensor], block_sizes: Sequence[int],
    out: StepBuffers,
) -> None:  # fmt: skip
    if not tables:  # a model without KV groups
        return gather_inputs.reference(rows, positions, tokens, tables, block_sizes, out)
    count, scrap = rows.shape[0], tokens.shape[0] - 1
    grid = (cdiv(count, _BLOCK),)
    for group, (table, size, slots) in enumerate(zip(tables, block_sizes, out.slots, strict=True)):
        _gather_kernel[grid](
            rows, positions, tokens, table, out.token_ids, out.positions, out.contexts, slots, count, scrap,
            tokens.stride(0), table.stride(0), SIZE=size, FIRST=group == 0, BLOCK=_BLOCK,
        )  # fmt: skip


def add_forms(table: FormTable) -> None:
    table.form(gather_inputs)(gather_inputs_cuda)
