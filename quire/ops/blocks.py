"""Decoder blocks of the common form, several of them as one call where a device has a faster way to run them.

Common: norm, attention over a paged cache, norm, gated mlp, each added to the stream as it is. `join_blocks` takes what
the blocks are made of and gives a function for a step; None where the device has none, and then layers run one by one.
What it gives holds addresses: it is valid until weights or caches are replaced. Must not know: modules, architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.ops.few import NormRule
from quire.ops.op import op
from quire.ops.packed import Matrix
from quire.ops.parts import Delta
from quire.ops.qkv import QkvPrep


class Weights(NamedTuple):
    """One matrix, packed or plain, and its bias."""

    matrix: Matrix | Tensor
    bias: Tensor | None


class BlockParts(NamedTuple):
    """What a block is made of. `prep` without cos and sin."""

    matrices: tuple[Weights, Weights, Weights, Weights]  # qkv, o, up, down
    norms: tuple[NormRule, NormRule]
    prep: QkvPrep
    cache: object  # as an attention backend made it
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Tensor | None
    act: str  # name of the plain activation


class StepTurn(NamedTuple):
    """What blocks of one KV group and one rotary embedding share in a step."""

    plan: object  # as an attention backend made it
    cos: Tensor | None
    sin: Tensor | None


# (stream, what is to be added to it, turns) -> the same after the last block; None: layers have to run this step
BlocksRun: TypeAlias = Callable[[Tensor, Delta, Sequence[StepTurn]], tuple[Tensor, Tensor] | None]


@op
def join_blocks(blocks: Sequence[BlockParts], which: Sequence[int], dtype: torch.dtype) -> BlocksRun | None:
    """`which[i]`: the turn that block i takes, among those of a step."""
    return None
