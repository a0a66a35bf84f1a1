"""Batch: the device view of one step, and the interfaces through which layers reach attention.

Made by worker/inputs.py (Batch, GroupStep) and by an attention backend (AttentionPlan, LayerCache); read by the
layers. A layer knows the index of its KV group and the cache it was bound to, nothing of blocks, rows or requests.

    token_ids  [ row 0 tokens | row 1 tokens | ... ]   rows lie one after another, in any mix of chunks and decodes
    plans[g]   how the layers of KV group g attend in this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep
from quire.schema.kv import KVSpec


class LayerCache(Protocol):
    """One layer's keys and values, as views of the worker's memory; its inside belongs to the backend that made it."""

    spec: KVSpec


@runtime_checkable
class ScaledCache(Protocol):
    """A cache with one scale for a layer's keys and one for its values; None: it has none after all."""

    layer_scales: Tensor | None  # float32 [2], on the device: read by every step, graphs included
    uncalibrated: bool  # the next step that is not captured measures its keys and values and sets the scales


class FusedRun(Protocol):
    """Attention from the fused projection on: norm and rotate heads, write keys and values, attend. [T, Hq, Dv]."""

    def __call__(
        self,
        qkv: Tensor | PartialSums,  # [T, (Hq + 2 Hkv) * D]
        prep: QkvPrep,
        cache: LayerCache | None,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,  # [Hq]
        alibi: Tensor | None = None,  # [Hq] slopes
    ) -> Tensor: ...


class AttentionPlan(Protocol):
    """How one KV group attends in one step; shared by all layers of the group."""

    @property
    def run_fused(self) -> FusedRun | None:
        """None: layers prepare queries, keys and values themselves and call `run`."""
        ...

    def run(
        self,
        q: Tensor,  # [T, Hq, D]
        k: Tensor,  # [T, Hkv, D]
        v: Tensor | None,  # [T, Hkv, Dv]; None: values are the first v_size of the keys (latent attention)
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,  # only with v=None
        softcap: float = 0.0,
        sinks: Tensor | None = None,  # [Hq]
        alibi: Tensor | None = None,  # [Hq] slopes, or [Hq, G] learned: see ops/attention.by_distance
    ) -> Tensor:  # [T, Hq, Dv]
        """Write this step's k and v to their slots, then attend causally over each row's context."""
        ...


class RefilledPlan(AttentionPlan, Protocol):
    """A plan captured in a graph that serves steps of any mix."""

    def refill(self, step: GroupStep) -> bool:
        """Let the next replay serve this step. False, and nothing is changed: it does not fit the captured one."""
        ...


class BothWays(NamedTuple):
    """Positions of one row that attend to each other in both directions; all that a step computes of them are in it."""

    entry: int  # of the step's rows
    first: int
    last: int  # exclusive
    past_window: bool = False  # a window hides nothing of the range
    later: tuple[tuple[int, int], ...] = ()  # [first, last) of further positions behind, which these read too


class GroupStep(NamedTuple):
    """What a backend must know of one step to plan one KV group. Rows with query_lens 0 are allowed.

    The first five fields are enough on CPU. A worker whose rows live on a device fills all of them: `block_tables` is
    then the whole table of the device and `row_index` says which of its rows each entry uses. With `is_static` the plan
    is captured in a graph and replayed for other steps: see worker/graphs.py and worker/mixed_graphs.py for what is
    fixed and what changes.
    """

    block_tables: Tensor  # [R, max_blocks] int32; -1 where a block was freed or is absent. With row_index: [rows, W]
    query_starts: Tensor  # [R+1] int32, running sum of query_lens
    context_lens: Sequence[int]  # host: tokens of each row once this step is done (start + count)
    query_lens: Sequence[int]  # host: tokens of each row in this step
    slots: Tensor  # [T] int64: block * block_size + offset where each token's keys and values go; -1: nowhere
    row_index: Tensor | None = None  # [R] int32 on the device; None: entry i uses row i of block_tables
    contexts: Tensor | None = None  # [R] int32 on the device: context_lens; 0: padding, which reads nothing
    is_decode: bool = False  # one query per entry: R == T and query_starts is 0, 1, .. R
    host_tables: np.ndarray | None = None  # block_tables as the host knows them; None: it does not
    host_rows: np.ndarray | None = None  # [R] row_index as the host knows it
    both_ways: Sequence[BothWays] = ()  # for backends that say so (attention/both_ways.py)
    num_drafts: Sequence[int] = ()  # host: how many of each row's last tokens may be wrong; only for groups of states
    spare: int = -1  # block of the state after the first of them; those after the others follow
    is_static: bool = False  # to be captured; context_lens and query_lens then hold the largest values there can be


class GivenVectors(NamedTuple):
    """Vectors that stand in place of token embeddings: of media, or embeddings that a request brought itself."""

    places: Tensor  # [G] int64: where in the step, each once
    vectors: Tensor  # [G, width of the embedding, and what layers add later behind it]


class LentKV(NamedTuple):
    """A layer's keys and values of a step, [T, Hkv, D] each, and where those of earlier steps are."""

    k: Tensor
    v: Tensor
    cache: LayerCache | None
    group: int


@dataclass
class Batch:
    """One step for the model. `logit_index` names the tokens whose hidden state is sampled, any number of each row.

    The last fields are None in most steps. A graph is captured for some of them (worker/device_inputs.py); a step that
    has another runs without a graph. A model that cannot use a field must refuse the step, not ignore it.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    plans: list[AttentionPlan]  # index = KV group
    logit_index: Tensor  # [S] int64, in [0, T)
    num_tokens: int
    steps: Sequence[GroupStep] = ()  # what the plans were made from, for models that cannot use them
    embedded: Tensor | None = None  # [T, width] the tokens' embeddings, for models whose layers read them again
    layer_inputs: Tensor | None = None  # [T, layers, width] vectors that each layer gets for a token (layers/altup.py)
    lent: dict[str, LentKV] | None = None  # keys and values of this step that later layers read; None: none do
    encoded: Tensor | None = None  # [S, width] encoder outputs of rows that begin in this step, in the order of rows
    stream: Tensor | None = None  # [T, stream_width] from the stage before; None: the model's first layers are here
    input_vectors: GivenVectors | None = None  # put over the token embeddings before anything reads them
    adapter_index: Tensor | None = None  # [T] int32: adapter of each token's row, 0: none; None: no row has one
    position_channels: Tensor | None = None  # [C, T] int64 (M-RoPE); None: every channel is `positions`
    through_linears: bool = False  # every matmul goes through Linear.forward: nothing may read weights past it
    only_adapters: bool = False  # .. but what adds adapters itself: they are the only reason for that
    is_captured: bool = False  # a graph's: nothing may depend on what the tensors hold now
    only_sampled: bool = False  # a model may return the states of `logit_index` alone, in its order


class NoAttention:
    """A plan that touches no cache and returns zeros: for measuring a forward pass before any KV memory exists."""

    run_fused = None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        width = v_size if v is None else v.shape[-1]
        return torch.zeros((q.shape[0], q.shape[1], width), dtype=q.dtype, device=q.device)
