"""The decoder: every text architecture is an Arch, and this builds and runs it.

In: a Batch. Out: hidden states [T, width], then logits for the rows the worker selects. Attention goes through the
batch's plans; weights are loaded through the table. Must not know: which model it is, only fields of Arch.

    x, delta = stream and what the last sublayer adds to it; a norm joins the two (see Norm.add), so that the sum and
    the norm after it can be one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from quire.layers.attention import Attention, AttentionKind, KVLayer
from quire.layers.batch import Batch, LayerCache
from quire.layers.cross import CrossAttention
from quire.layers.embed import Embedding, Head, SinePositions
from quire.layers.kda import Kda, KdaKind
from quire.layers.lightning import Lightning, LightningKind
from quire.layers.linear import Linear
from quire.layers.mla import LatentAttention, MlaKind
from quire.layers.mlp import Mlp, NormedMlp, XieluMlp
from quire.layers.moe import Moe
from quire.layers.norm import NoNorm, Norm
from quire.layers.rope import Rope, RotaryTables
from quire.layers.shared import SharedUse
from quire.layers.ssm import DeltaKind, DeltaNet, Mamba, Mamba2, Mamba2Kind, MambaKind, ShortConv, ShortConvKind
from quire.layers.stored import finish_matrices
from quire.layers.table import WeightTable
from quire.layers.veto import hooks_of, vetoed
from quire.models.arch import Arch, Layer
from quire.models.layout import arrange_for
from quire.models.whole import Stretch, Whole
from quire.ops.act import tanh
from quire.ops.few import NormRule, few_rows, linear_add, linear_parts, norm_linear, part_rows
from quire.ops.parts import Delta, whole
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.kv import KVSpec

# The norms of a block: before attention, after it, before the mlp, after it ('' = none).
NORMS = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "parallel": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "after": ("", "input_layernorm", "", "post_attention_layernorm"),
    "single": ("input_layernorm", "", "", ""),
    "kept": ("input_layernorm", "", "post_attention_layernorm", ""),
    "cross_pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "cross_after": ("", "input_layernorm", "", "post_attention_layernorm"),
    "pre_post": ("input_layernorm", "", "post_attention_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip
COMMON_NAMES = ((r"^(layers\.\d+|embed_tokens|norm)\.", r"model.\1."),)  # checkpoints saved without their head


class DecoderBlock(nn.Module):
    """Norm, attention, norm, mlp: in sequence (norms before, after, or both)."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        layer, prefix = arch.layers[index], f"model.layers.{index}."
        self.attn = _mixer(arch, layer, prefix, rope, storage)
        self.mlp = _mlp(arch, layer, f"{prefix}mlp.", storage)
        norms = [Norm(prefix + name, (arch.width,), arch.norm, storage) if name else None for name in NORMS[arch.order]]
        self.before_attn, self.after_attn = norms[0] or NoNorm(), norms[1]
        self.before_mlp, self.after_mlp = norms[2] or NoNorm(), norms[3]
        self.scale = arch.residual_scale
        self.few = Few.of(self, arch, storage)
        self.in_parts = InParts.of(self, storage) if self.few is not None else None
        self.whole = Whole.of(self, arch)

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        if self.few is not None and not batch.through_linears:
            if delta is None and x.shape[0] <= self.few.rows:
                return self.few(x, batch, rotary), None
            if self.in_parts is not None and x.shape[0] <= self.in_parts.rows:
                return self.in_parts(x, delta, batch, rotary)
        h, x = self.before_attn.add(x, delta)
        h = self.attn(h, batch, rotary)
        if self.after_attn is not None:
            h = self.after_attn(h)
        h, x = self.before_mlp.add(x, h if self.scale == 1.0 else h * self.scale)
        h = self.mlp(h)
        if self.after_mlp is not None:
            h = self.after_mlp(h)
        return x, h if self.scale == 1.0 else h * self.scale


class Few:
    """A block's path for a few rows: norms and additions are fused into the matmuls (see ops/few.py)."""

    def __init__(self, attn: Attention, mlp: Mlp | Moe, norms: tuple[NormRule, NormRule], storage: Storage) -> None:
        self.attn, self.mlp, self.norms = attn, mlp, norms
        self.rows = storage.of(few_rows)(attn.qkv.in_size, storage.dtype)
        self._norm_linear, self._linear_add = storage.of(norm_linear), storage.of(linear_add)

    @classmethod
    def of(cls, block: DecoderBlock, arch: Arch, storage: Storage) -> Few | None:
        """None if the block is not stream + attention(norm(stream)), then the same with the mlp, with plain weights;
        or if the device has no faster path."""
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if arch.order != "pre" or block.scale != 1.0 or not isinstance(attn, Attention) or not mlp.joins:
            return None
        rules = tuple(norm.rule() for norm in norms if isinstance(norm, Norm))
        if len(rules) != 2 or rules[0] is None or rules[1] is None or not (attn.qkv.is_plain and attn.o.is_plain):
            return None
        few = cls(attn, mlp, (rules[0], rules[1]), storage)
        return few if few.rows else None

    def __call__(self, x: Tensor, batch: Batch, rotary: RotaryTables | None) -> Tensor:
        attn = self.attn
        qkv = self._norm_linear(x, self.norms[0], *attn.qkv.read_plain())
        x = self._linear_add(attn.attend(qkv, batch, rotary), *attn.o.read_plain(), x)
        return self.mlp.join(x, self.norms[1])


class InParts:
    """A block's path for some more rows: partial sums of matmuls are added up by their consumers (see ops/few.py)."""

    def __init__(self, attn: Attention, mlp: Mlp | Moe, norms: tuple[Norm, Norm], storage: Storage) -> None:
        self.attn, self.mlp, self.norms = attn, mlp, norms
        self.rows = storage.of(part_rows)(attn.qkv.in_size, storage.dtype)
        self._linear_parts = storage.of(linear_parts)

    @classmethod
    def of(cls, block: DecoderBlock, storage: Storage) -> InParts | None:
        """For blocks that have a path for a few rows; None if the device has no faster path."""
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        assert isinstance(attn, Attention) and isinstance(norms[0], Norm) and isinstance(norms[1], Norm)
        parts = cls(attn, mlp, (norms[0], norms[1]), storage)
        return parts if parts.rows else None

    def __call__(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        attn = self.attn
        h, x = self.norms[0].add(x, delta)
        qkv = self._linear_parts(h, *attn.qkv.read_plain())
        out = self._linear_parts(attn.attend(qkv, batch, rotary), *attn.o.read_plain())
        h, x = self.norms[1].add(x, out)
        return x, self.mlp.in_parts(h)


class ParallelBlock(DecoderBlock):
    """Attention and mlp read the same stream; both outputs are added to it."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__(arch, index, rope, storage)
        if arch.one_norm:
            self.before_mlp = NoNorm()
        self.one_norm = arch.one_norm

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        h, x = self.before_attn.add(x, delta)
        out = self.attn(h, batch, rotary) + self.mlp(h if self.one_norm else self.before_mlp(x))
        return x, out if self.scale == 1.0 else out * self.scale


class AfterBlock(DecoderBlock):
    """Post-norm: x = norm(x + sublayer(x))."""

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        assert self.after_attn is not None and self.after_mlp is not None
        x = self.after_attn(x + self.attn(x, batch, rotary))
        return self.after_mlp(x + self.mlp(x)), None


class KeptBlock(DecoderBlock):
    """A norm's output becomes the stream: h = norm(x); x = a h + b sublayer(h)."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__(arch, index, rope, storage)
        self.joins = arch.layers[index].joins

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        stream, attn, other, mlp = self.joins
        h, _ = self.before_attn.add(x, delta)
        h, _ = self.before_mlp.add(h * stream, self.attn(h, batch, rotary) * attn)
        return h * other, self.mlp(h) * mlp


class CrossBlock(DecoderBlock):
    """Self-attention, cross-attention over an encoder's output, mlp; each after a norm."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__(arch, index, rope, storage)
        kind = AttentionKind(
            heads=arch.heads, kv_heads=arch.kv_heads, head_dim=arch.head_dim, softcap=arch.attn_softcap,
            scale=arch.attn_scale or arch.head_dim**-0.5, qkv_bias=arch.qkv_bias, o_bias=arch.o_bias,
        )  # fmt: skip
        prefix = f"model.layers.{index}.cross_"
        self.cross = CrossAttention(f"{prefix}attn.", arch.width, kind, max(arch.cross, 0), storage)
        self.cross_norm = Norm(f"{prefix}layernorm", (arch.width,), arch.norm, storage)

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        h, x = self.before_attn.add(x, delta)
        h, x = self.cross_norm.add(x, self.attn(h, batch, rotary))
        h, x = self.before_mlp.add(x, self.cross(h, batch))
        return x, self.mlp(h)


class CrossAfterBlock(CrossBlock):
    """The same, with post-norms."""

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        assert self.after_attn is not None and self.after_mlp is not None
        x = self.after_attn(x + self.attn(x, batch, rotary))
        x = self.cross_norm(x + self.cross(x, batch))
        return self.after_mlp(x + self.mlp(x)), None


class SingleBlock(nn.Module):
    """One norm and one sublayer: a mixer or an mlp."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        layer, prefix = arch.layers[index], f"model.layers.{index}."
        only_mlp = layer.mixer == "none"
        self.norm = Norm(f"{prefix}input_layernorm", (arch.width,), arch.norm, storage)
        self.attn = None if only_mlp else _mixer(arch, layer, prefix, rope, storage)
        self.mlp = _mlp(arch, layer, f"{prefix}mlp.", storage) if only_mlp else None

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        h, x = self.norm.add(x, delta)
        if self.attn is not None:
            return x, self.attn(h, batch, rotary)
        assert self.mlp is not None
        return x, self.mlp(h)


class SharedBlock(SingleBlock):
    """A norm and a mixer, to whose input a shared block adds."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__(arch, index, rope, storage)
        assert arch.shared is not None
        self.use = SharedUse(index, arch.width, arch.shared, arch.norm, rope, storage)

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        x = x if delta is None else x + whole(delta)
        assert self.attn is not None
        return x, self.attn(self.norm(x + self.use(x, batch, rotary)), batch, rotary)


BLOCKS = {
    "pre": DecoderBlock, "post": DecoderBlock, "sandwich": DecoderBlock, "pre_post": DecoderBlock,
    "parallel": ParallelBlock, "after": AfterBlock, "single": SingleBlock, "kept": KeptBlock, "shared": SharedBlock,
    "cross_pre": CrossBlock, "cross_after": CrossAfterBlock,
}  # fmt: skip


def _mixer(arch: Arch, layer: Layer, prefix: str, rope: Rope | None, storage: Storage) -> nn.Module:
    """The token mixer of a layer, called as (x, batch, rotary)."""
    if layer.mixer == "attention":
        return _attention(arch, layer, f"{prefix}self_attn.", rope, storage)
    if layer.mixer == "state":
        return _state(arch, layer, f"{prefix}mixer.", storage)
    if layer.mixer == "both":
        attention = _attention(arch, layer, f"{prefix}self_attn.", rope, storage)
        return BothMixers(attention, _state(arch, layer, f"{prefix}mixer.", storage))
    raise ConfigError(f"unknown token mixer {layer.mixer!r}")


class BothMixers(nn.Module):
    """Attention and a state side by side."""

    def __init__(self, attn: nn.Module, state: nn.Module) -> None:
        super().__init__()
        self.attn, self.state = attn, state

    def forward(self, x: Tensor, batch: Batch, rotary: RotaryTables | None) -> Tensor:
        return self.state(x, batch, rotary) + self.attn(x, batch, rotary)


def _state(arch: Arch, layer: Layer, prefix: str, storage: Storage) -> KVLayer:
    match kind := arch.state:
        case Mamba2Kind():
            return Mamba2(prefix, arch.width, kind, storage)
        case MambaKind():
            return Mamba(prefix, arch.width, kind, storage)
        case DeltaKind():
            return DeltaNet(prefix, arch.width, kind, storage)
        case ShortConvKind():
            return ShortConv(prefix, arch.width, kind, storage)
        case LightningKind():
            return Lightning(prefix, arch.width, kind, layer.fade, storage)
        case KdaKind():
            return Kda(prefix, arch.width, kind, storage)
    raise ConfigError("a layer has a recurrent state, but the architecture does not define it")


def _attention(arch: Arch, layer: Layer, prefix: str, rope: Rope | None, storage: Storage) -> KVLayer:
    scale = layer.attn_scale or arch.attn_scale or arch.head_dim**-0.5
    if arch.mla is not None:
        m = arch.mla
        latent = MlaKind(
            heads=arch.heads, kv_rank=m.kv_rank, nope=m.nope, rope=m.rope, value=m.value, scale=scale,
            q_rank=m.q_rank, bias=arch.qkv_bias,
        )  # fmt: skip
        return LatentAttention(prefix, arch.width, latent, rope, storage)
    kind = AttentionKind(
        heads=arch.heads, kv_heads=arch.kv_heads, head_dim=arch.head_dim, scale=scale, window=layer.window,
        chunk=layer.chunk, softcap=arch.attn_softcap, sinks=arch.sinks, alibi=arch.alibi, qkv_bias=arch.qkv_bias,
        o_bias=arch.o_bias, qk_norm=arch.qk_norm if layer.qk_norm else "", qkv_clip=arch.qkv_clip, gated=arch.attn_gate,
        qk_norm_kind=replace(arch.norm, bias=arch.qk_norm_bias, weight=arch.qk_norm_weight and arch.norm.weight),
        grow=arch.grow if layer.grow else (0.0, 1, 0), qk_norm_late=arch.qk_norm_late and layer.qk_norm,
        gate_name=arch.gate_name, out_norm=arch.inner_norms[0],
    )  # fmt: skip
    return Attention(prefix, arch.width, kind, rope, storage)


def _mlp(arch: Arch, layer: Layer, prefix: str, storage: Storage) -> Mlp | Moe:
    if layer.moe and arch.moe is not None:
        return Moe(prefix, arch.width, arch.moe, storage, act=arch.act)
    if arch.act == "xielu":
        return XieluMlp(prefix, arch.width, arch.ffn, storage, bias=arch.mlp_bias)
    more: dict = dict(act=arch.act, gated=arch.gated, bias=arch.mlp_bias)
    if arch.inner_norms[1]:
        return NormedMlp(prefix, arch.width, arch.ffn, storage, norm=arch.inner_norms[1], kind=arch.norm, **more)
    return Mlp(prefix, arch.width, arch.ffn, storage, down_bias=arch.down_bias, **more)


def _positions(arch: Arch, storage: Storage) -> nn.Module:
    if arch.position_kind == "sines":
        return SinePositions(arch.positions, arch.width, storage, offset=arch.position_offset)
    return Embedding("model.embed_positions", arch.positions, arch.width, storage, offset=arch.position_offset)


class Decoder(nn.Module):
    captures = True  # its forward never waits for the device: a decode step may be captured in a graph

    def __init__(self, arch: Arch, storage: Storage, *, max_model_len: int) -> None:
        super().__init__()
        self.arch, self.storage = arch, storage
        self.captures = not isinstance(arch.state, KdaKind)  # its scan waits for the device
        width, inner = arch.width, arch.embed_width or arch.width
        self.embed = Embedding("model.embed_tokens", arch.vocab, inner, storage, scale=arch.embed_scale, is_cut=True)
        self.positions = _positions(arch, storage) if arch.positions else None
        self.project_in = Linear("model.", inner, {"project_in": width}, storage) if arch.embed_width else None
        self.project_out = Linear("model.", width, {"project_out": inner}, storage) if arch.embed_width else None
        self.embed_norm = Norm("model.embed_norm", (width,), arch.norm, storage) if arch.embed_norm else None
        kinds: list = []  # distinct rotary kinds, in order of first use
        for layer in arch.layers:
            if layer.rope is not None and layer.rope not in kinds:
                kinds.append(layer.rope)
        ropes = [Rope(kind, max_model_len, storage) for kind in kinds]
        self.ropes = nn.ModuleList(ropes)
        self._rotary_tables = [rope.tables for rope in ropes]
        self.rope_of = [None if layer.rope is None else kinds.index(layer.rope) for layer in arch.layers]
        self.layers = nn.ModuleList()
        for i, (layer, which) in enumerate(zip(arch.layers, self.rope_of, strict=True)):
            layer_arch = replace(arch, order=layer.order or arch.order)
            self.layers.append(
                BLOCKS[layer_arch.order](layer_arch, i, None if which is None else ropes[which], storage)
            )
        uses = [layer.use for layer in self.layers if isinstance(layer, SharedBlock)]
        for use in uses:
            use.link(uses)
        wholes = [layer.whole if type(layer) is DecoderBlock else None for layer in self.layers]
        self._stretches = Stretch.cut(self.layers, self.rope_of, wholes, storage)
        self._hooks = hooks_of(self.layers.modules())
        self.norm = Norm("model.norm", (width,), arch.norm, storage) if arch.final_norm else NoNorm()
        self._tanh = storage.of(tanh)
        tied = self.embed if arch.tie else None
        self.head = Head("lm_head", arch.vocab, inner, storage, bias=arch.head_bias, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, width of the head]."""
        if batch.adapter_index is not None:
            raise NotBuiltError("a step uses adapters, which this version of Quire cannot apply")
        if any(self._hooks):
            batch = vetoed(batch)
        where, channels = batch.positions, batch.position_channels
        if channels is None:
            rotaries = [RotaryTables(*tables(where)) for tables in self._rotary_tables]
        else:
            rotaries = [rope(where, channels) for rope in self.ropes]
        x = self.embed(batch.token_ids)
        if batch.given is not None:
            x = x.index_copy(0, batch.given.places, batch.given.vectors.to(x.dtype))
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(where)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.arch.shared is not None:
            batch = replace(batch, embedded=x)
        delta: Delta = None
        for stretch in self._stretches:
            x, delta = stretch(x, delta, batch, rotaries)
        x = self.norm(x) if delta is None else self.norm.joined(x, delta)[0]
        return x if self.project_out is None else self.project_out(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, width] -> [S, vocab] float32."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """The same in the head's dtype, without converting to float32, if nothing follows the head."""
        logits = self.head(hidden)
        if self.arch.logit_scale == 1.0 and not self.arch.logit_softcap:
            return logits
        logits = logits.float()
        if self.arch.logit_scale != 1.0:
            logits = logits * self.arch.logit_scale
        cap = self.arch.logit_softcap
        return self._tanh(logits / cap) * cap if cap else logits

    def table(self) -> WeightTable:
        self.forget_addresses()
        arch = self.arch
        ignore = (*arch.ignore, r"^lm_head\.weight$") if arch.tie else arch.ignore
        return WeightTable.of(self, names=(*arch.names, *COMMON_NAMES), ignore=ignore, arrange=arrange_for(arch))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from (checkpoint name, tensor) pairs, all or some; returns the names that were used."""
        taken = self.table().load_all(weights)
        self.finish_weights()
        return taken

    def finish_weights(self) -> None:
        """To be called once parameters are filled through the table, or replaced by other objects."""
        self.forget_addresses()
        finish_matrices(self)

    def forget_addresses(self) -> None:
        """Weights or caches were moved or rearranged since the last step."""
        for stretch in self._stretches:
            stretch.forget()

    def kv_layers(self) -> list[KVLayer]:
        return [module for module in self.modules() if isinstance(module, KVLayer)]

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        return [layer.kv_spec(block_size, kv_dtype) for layer in self.kv_layers()]

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        """Give every attention layer its cache and the index of its group's plan in Batch.plans."""
        self.forget_addresses()
        for layer in self.kv_layers():
            layer.bind(caches[layer.layer], groups[layer.layer])
