"""Decoder blocks of the common form, several of them in one call if a device has a faster way to run them.

Common form: norm, attention over a paged cache, norm, gated mlp, each added to the residual stream. `join_blocks` takes
the parts of the blocks and returns a function for a step; None if the device has none, and then layers run one by one.
The function holds addresses: it is valid until weights or caches are replaced. Must not know: modules, architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.ops.few import NormRule
from quire.ops.lora import AdapterRows, LowRank
from quire.ops.op import op
from quire.ops.packed import Matrix
from quire.ops.parts import Delta
from quire.ops.qkv import QkvPrep


class Weights(NamedTuple):
    """One matrix, packed or plain, and its bias."""

    matrix: Matrix | Tensor
    bias: Tensor | None


class BlockParts(NamedTuple):
    """The parts of a block. `prep` without cos and sin."""

    matrices: tuple[Weights, Weights, Weights, Weights]  # qkv, o, up, down
    norms: tuple[NormRule, NormRule]
    prep: QkvPrep
    cache: object  # made by an attention backend
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Tensor | None
    act: str  # name of the plain activation
    adapters: tuple[LowRank, LowRank, LowRank, LowRank] | None = None  # of the matrices; None: the engine has none
    reduce: Callable[[Tensor], Tensor] | None = None  # sums what o and down give over ranks; None: nothing is summed


class StepTurn(NamedTuple):
    """What blocks of one KV group and one rotary embedding share in a step."""

    plan: object  # made by an attention backend
    cos: Tensor | None
    sin: Tensor | None


# (stream, pending delta, turns, adapters of the rows) -> the first two after the last block; None: layers have to run
# this step
BlocksRun: TypeAlias = Callable[
    [Tensor, Delta, Sequence[StepTurn], AdapterRows | None], tuple[Tensor, Tensor] | None
]  # fmt: skip


@op
def join_blocks(blocks: Sequence[BlockParts], which: Sequence[int], dtype: torch.dtype) -> BlocksRun | None:
    """`which[i]`: the turn that block i takes, among those of a step."""
    return None
