"""From rows and positions to the inputs of a step: token ids from the rows, cache slots from the block tables.

In: tensors of one device. Out: static buffers, filled. The last row of tokens and tables is unused: an entry that
refers to it is padding, and gets token 0, context 0 and no slot (-1). Must not know: requests, grants, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.op import op


class StepBuffers(NamedTuple):
    """What `gather_inputs` fills, one entry per token."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    contexts: Tensor  # [T] int32: position + 1; 0 for padding
    slots: tuple[Tensor, ...]  # per KV group [T] int64: block * block_size + offset; -1 if there is no block

    def first(self, count: int) -> StepBuffers:
        return StepBuffers(
            self.token_ids[:count], self.positions[:count], self.contexts[:count], tuple(s[:count] for s in self.slots)
        )


def make_buffers(size: int, num_groups: int, device: torch.device) -> StepBuffers:
    wide = torch.zeros((num_groups + 2, size), dtype=torch.int64, device=device)
    return StepBuffers(wide[0], wide[1], torch.zeros(size, dtype=torch.int32, device=device), tuple(wide[2:].unbind()))


@op
def gather_inputs(
    rows: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32
    tokens: Tensor,  # [max_rows + 1, width] int32
    tables: Sequence[Tensor],  # per KV group [max_rows + 1, W] int32
    block_sizes: Sequence[int],
    out: StepBuffers,
) -> None:
    scrap = tokens.shape[0] - 1
    index, long_positions = rows.long(), positions.long()
    real = index != scrap
    out.token_ids.copy_(tokens[index, long_positions])
    out.positions.copy_(long_positions)
    out.contexts.copy_(torch.where(real, long_positions + 1, 0))
    for table, size, slots in zip(tables, block_sizes, out.slots, strict=True):
        blocks = table[index, long_positions // size].long()
        slots.copy_(torch.where(real & (blocks >= 0), blocks * size + long_positions % size, -1))
