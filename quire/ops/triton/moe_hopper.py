"""Which grouped matmuls experts use on Hopper, by their pairs: streamed weights, split tiles, or what others use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.moe import run_experts as run_experts_op
from quire.ops.op import Fits, FormTable
from quire.ops.triton import launch
from quire.ops.triton.moe import Config, run_experts, tma_configs_of
from quire.ops.triton.moe_split import SplitConfig
from quire.ops.triton.moe_stream import StreamConfig

STREAMED = ((6, 16), (18, 32), (40, 64))  # up to so many pairs of an expert, on average: the pairs of a tile
LEAST_SPLIT = 100  # pairs of an expert above which split tiles are the faster ones
_MOST_ENTRIES = 16384  # of a token: where it begins has to fit 32 bits


def configs_of(pairs: int, experts: int) -> tuple[Config, Config]:
    """As tma_configs_of, by what is faster on an H200."""
    each = pairs / experts
    if pairs * _MOST_ENTRIES > 1 << 31:
        return tma_configs_of(pairs, experts)
    if each > LEAST_SPLIT:
        return SplitConfig(), SplitConfig()
    for most, rows in STREAMED:
        if each <= most:
            return StreamConfig(rows), StreamConfig(rows)
    return tma_configs_of(pairs, experts)


def add_forms(table: FormTable, codes: dict[Callable, int], fits: Fits, *, early: bool) -> None:
    launch.DESCRIPTORS.add(TensorDescriptor)
    table.form(run_experts_op, fits)(partial(run_experts, codes=codes, choose=configs_of, early=early))
