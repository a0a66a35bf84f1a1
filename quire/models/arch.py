"""An architecture as data: Arch for the model, Layer for each layer, and the small records of the layers.

A field describes a behaviour, never a model. Declarations in zoo/ make an Arch from a config; decoder.py builds it.
Must not know: tensors, checkpoint formats, shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.layers.kda import KdaKind
from quire.layers.lightning import LightningKind
from quire.layers.moe import MoeKind
from quire.layers.norm import RMS, NormKind
from quire.layers.rope import RopeKind
from quire.layers.shared import SharedKind
from quire.layers.ssm import DeltaKind, Mamba2Kind, MambaKind, ShortConvKind

if TYPE_CHECKING:
    from quire.layers.altup import AltUpKind
    from quire.layers.modality_tokens import ModalityTokensKind


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer."""

    rope: RopeKind | None = None
    window: int = 0  # sliding window in tokens, the current one included; 0: none
    chunk: int = 0  # chunked local attention, in tokens; 0: none
    mixer: str = "attention"  # attention | state | both (side by side, their outputs added) | none (mlp only)
    order: str = ""  # position of this layer's norms; '': as in the others
    moe: bool = False  # experts instead of the dense mlp
    attn_scale: float = 0.0  # 0: the model's
    qk_norm: bool = True  # False: not in this layer, although the others have one
    grow: bool = True  # False: queries of this layer are not scaled by position
    fade: float = 1.0  # factor on the decay rates of a lightning layer's state
    ffn: int = 0  # entries of this layer's mlp; 0: the model's
    sparsity: float = 0.0  # share of the mlp's gates that is cut to zero; 0: none
    kv_from: int = -1  # the layer before whose keys and values this one reads; -1: its own
    lends: bool = False  # later layers read its keys and values
    joins: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # order kept: factors of stream and attention, of stream and mlp


@dataclass(frozen=True)
class Mla:
    """Latent attention: compressed keys and values. Sizes per head, except the ranks."""

    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int = 0  # 0: queries are not compressed
    latent_scale: float = 1.0  # of what keys and values are computed from


@dataclass(frozen=True)
class Arch:
    vocab: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: tuple[Layer, ...]
    max_positions: int
    # norms
    norm: NormKind = RMS
    order: str = "pre"  # a key of decoder.NORMS
    one_norm: bool = False  # parallel: attention and mlp read the same norm
    embed_norm: bool = False
    final_norm: bool = True
    # attention
    qk_norm: str = ""  # head | each | full
    qk_norm_bias: bool = False
    qk_norm_late: bool = False  # after the rotary embedding
    qk_norm_weight: bool = True
    v_norm: bool = False  # values are normalised per head, without a weight
    qkv_bias: bool = False
    o_bias: bool = False
    qkv_clip: float = 0.0
    attn_scale: float = 0.0  # 0: head_dim ** -0.5
    attn_softcap: float = 0.0
    sinks: bool = False
    alibi: float = 0.0  # factor on the slopes; 0: no alibi
    grow: tuple[float, int, int] = (0.0, 1, 0)  # queries are scaled by position: (beta, length, shift)
    mla: Mla | None = None
    cross: int = -1  # most tokens of an encoder's output, for orders with cross-attention; 0: any number
    attn_gate: bool = False  # the output of attention is gated per head; q_proj has queries and gates
    gate_name: str = ""  # attn_gate: the gate is a projection of this name instead
    inner_norms: tuple[str, str] = ("", "")  # names of the norms before the output projections of attention and mlp
    shared: SharedKind | None = None  # the block that layers of order shared share
    altup: AltUpKind | None = None  # several streams, for layers of order altup
    state: Mamba2Kind | MambaKind | DeltaKind | ShortConvKind | LightningKind | KdaKind | None = None  # of such layers
    # mlp
    act: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    down_bias: bool | None = None  # of the down projection; None: as mlp_bias
    moe: MoeKind | None = None
    # ends
    embed_scale: float = 1.0
    deepstack: int = 0  # after so many first layers, further vectors of media are added to the stream
    modality_tokens: tuple[ModalityTokensKind, ...] = ()  # ids that are embedded otherwise
    embed_width: int = 0  # width of the token table if it differs; projected in and out
    residual_scale: float = 1.0
    positions: int = 0  # rows of a learned position table
    position_offset: int = 0
    position_kind: str = ""  # '' learned | sines, whose rates reach 1/10000 | even_sines, which stop one step before
    tie: bool = False
    input_only: int = 0  # so many of the last token ids stand in prompts only: there are no logits for them
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    # names and layouts of its checkpoints
    names: tuple[tuple[str, str], ...] = ()  # (pattern, canonical), applied in order
    ignore: tuple[str, ...] = ()  # patterns of checkpoint tensors that are not loaded
    unread: tuple[str, ...] = ()  # likewise, of weights that no computation reads: an adapter of them changes nothing
    state_layout: str = ""  # '' | per_key_head: rows of a delta net's fused projections are ordered by key head
    qkv_layout: str = ""  # rows of a fused qkv: '' q, k, v | per_head (q k v)* | per_group (q.. k v)* | qvk_in_four
    up_first: bool = False  # rows of a fused gate_up_proj: those of up come first
    in_two: bool = False  # the token table may be stored as two tensors, its first rows and the others
    transposed: bool = False  # matrices of the layers are stored [in, out]
    fold: tuple[tuple[str, float], ...] = ()  # (pattern of canonical names, factor): scales folded into a matrix
    expert_layout: str = ""  # '' | transposed: [E, in, out] | transposed_interleaved: with gate and up interleaved


def each(arch: Arch, change: Callable[[int, Layer], dict[str, Any]], **over: Any) -> Arch:
    """The same architecture with every layer updated by the result of `change(index, layer)`."""
    layers = tuple(replace(layer, **change(i, layer)) for i, layer in enumerate(arch.layers))
    return replace(arch, layers=layers, **over)


def with_rope(arch: Arch, **over: Any) -> Arch:
    """The same architecture with every rotary embedding changed."""
    return each(arch, lambda i, layer: {"rope": replace(layer.rope, **over)} if layer.rope else {})


def with_window(arch: Arch, window: int | None) -> Arch:
    """The same architecture with this sliding window in every layer (None or 0: in none)."""
    return each(arch, lambda i, layer: {"window": window or 0})
