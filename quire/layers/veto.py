"""The veto of a step: whether weights may be read past Linear.forward in it.

Faster ways to run a block (few rows, matmuls in parts, blocks in one call) and latent attention read matrices
themselves. They do so only in a step whose Batch.through_linears is False: whoever adds something to a matmul sets it
(rows with an adapter), and hooks that somebody registered on a module set it here. Steps without keep the faster ways,
and if adapters are its only reason so do those that add adapters themselves: blocks in one call (decoder.py) and
matmuls in parts. Must not know: what those ways are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from quire.layers.batch import Batch


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[int, Callable[..., Any]]]:
    """The tables of hooks of these modules: `any` of them is filled where somebody watches a module."""
    own = {id(module): module for module in modules}.values()
    return [hooks for module in own for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def vetoed(batch: Batch, *, only_adapters: bool = False) -> Batch:
    """The same step, in which rows have adapters or somebody watches a module."""
    if batch.through_linears:
        return batch
    return replace(batch, through_linears=True, only_adapters=only_adapters)
