"""The blocks of a decoder: in which order norms, token mixer and mlp follow each other, by Arch.order.

In: the stream x, what the last sublayer adds to it (delta), a Batch and its rotary tables. Out: the next pair. A block
of the common form has faster ways to the same result: `Few` and `InParts` for few rows, `Rounding` for many whose
weights are codes, `Whole` as a part of one compiled call. Must not know: which model it is, or what stands around its
layers (decoder.py, encoder.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from torch import Tensor, nn

from quire.layers.attention import Attention, AttentionKind, BorrowingAttention, KVLayer
from quire.layers.batch import Batch
from quire.layers.cross import CrossAttention
from quire.layers.kda import Kda, KdaKind
from quire.layers.lightning import Lightning, LightningKind
from quire.layers.linear import Linear
from quire.layers.mla import LatentAttention, MlaKind
from quire.layers.mlp import Mlp, NormedMlp, SparseMlp, XieluMlp
from quire.layers.moe import Moe
from quire.layers.norm import NoNorm, Norm
from quire.layers.rope import Rope, RotaryTables
from quire.layers.shared import SharedUse
from quire.layers.ssm import DeltaKind, DeltaNet, Mamba, Mamba2, Mamba2Kind, MambaKind, ShortConv, ShortConvKind
from quire.models.arch import Arch, Layer
from quire.models.stage import PipelineStage
from quire.ops.act import PLAIN
from quire.ops.blocks import BlockParts, Weights
from quire.ops.coded import CodedWeight, quantize_rows
from quire.ops.few import NormRule, added_rows, few_rows, linear_add, linear_parts, norm_linears, part_rows
from quire.ops.lora import LowRank
from quire.ops.parts import Delta, whole
from quire.ops.rounded import RoundedRows, RowCode, add_norm_rounded, rounded_parts, rounded_rows
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError

# The norms of a block: before attention, after it, before the mlp, after it ('' = none).
NORMS = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "parallel": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "altup": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "after": ("", "input_layernorm", "", "post_attention_layernorm"),
    "single": ("input_layernorm", "", "", ""),
    "kept": ("input_layernorm", "", "post_attention_layernorm", ""),
    "cross_pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "cross_after": ("", "input_layernorm", "", "post_attention_layernorm"),
    "pre_post": ("input_layernorm", "", "post_attention_layernorm", "post_feedforward_layernorm"),
    "pre_mlp": ("", "", "post_attention_layernorm", ""),
}  # fmt: skip


class DecoderBlock(nn.Module):
    """Norm, attention, norm, mlp: in sequence (norms before, after, or both)."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        layer, prefix = arch.layers[index], f"model.layers.{index}."
        self.attn = _mixer(arch, layer, prefix, rope, storage)
        self.mlp = mlp_of(arch, layer, f"{prefix}mlp.", storage)
        norms = [Norm(prefix + name, (arch.width,), arch.norm, storage) if name else None for name in NORMS[arch.order]]
        self.before_attn, self.after_attn = norms[0] or NoNorm(), norms[1]
        self.before_mlp, self.after_mlp = norms[2] or NoNorm(), norms[3]
        self.scale = arch.residual_scale
        self.few = Few.of(self, arch, storage)
        self.in_parts = None if self.few is None else InParts(self.few, storage)
        self.rounding = None if self.few is None else Rounding.of(self.few, storage)
        self.whole = Whole.of(self, arch)
        is_last = self.after_mlp is None and self.scale == 1.0
        self._sums_later = is_last and isinstance(self.mlp, Moe) and self.mlp.joins  # the next norm adds experts up
        self.is_end = False  # no layer follows: what attention leaves is needed of tokens that are sampled alone

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        if self.in_parts is not None and batch.only_adapters and x.shape[0] <= self.in_parts.adapter_rows:
            return self.in_parts(x, delta, batch, rotary)
        if self.few is not None and self.in_parts is not None and not batch.through_linears:
            if delta is None and x.shape[0] <= self.few.rows:
                return self.few(x, batch, rotary), None
            if x.shape[0] <= self.in_parts.rows:
                return self.in_parts(x, delta, batch, rotary)
            if self.rounding is not None and 0 < self.rounding.rows <= x.shape[0]:
                return self.rounding(x, delta, batch, rotary)
        h, x = self.before_attn.add(x, delta)
        if self.is_end and batch.only_sampled and not batch.through_linears:
            h, x = self._attend_sampled(h, batch, rotary), x.index_select(0, batch.logit_index)
        else:
            h = self.attn(h, batch, rotary)
        if self.after_attn is not None:
            h = self.after_attn(h)
        h, x = self.before_mlp.add(x, h if self.scale == 1.0 else h * self.scale)
        if self._sums_later and not batch.through_linears:
            return x, self.mlp.in_parts(h)
        h = self.mlp(h)
        if self.after_mlp is not None:
            h = self.after_mlp(h)
        return x, h if self.scale == 1.0 else h * self.scale

    def _attend_sampled(self, h: Tensor, batch: Batch, rotary: RotaryTables | None) -> Tensor:
        if isinstance(self.attn, Attention):
            return self.attn.o(self.attn.attend(self.attn.qkv(h), batch, rotary).index_select(0, batch.logit_index))
        return self.attn(h, batch, rotary).index_select(0, batch.logit_index)


class Few:
    """A block's path for a few rows: norms and additions are fused into the matmuls (see ops/few.py)."""

    def __init__(self, attn: Attention, mlp: Mlp | Moe, norms: tuple[Norm, Norm], rules: tuple[NormRule, NormRule],
                 storage: Storage) -> None:  # fmt: skip
        self.attn, self.mlp, self.norms, self.rules = attn, mlp, norms, rules
        self._few_rows, self._dtype = storage.of(few_rows), storage.dtype
        self._norm_linears, self._linear_add = storage.of(norm_linears), storage.of(linear_add)

    @classmethod
    def of(cls, block: DecoderBlock, arch: Arch, storage: Storage) -> Few | None:
        """None if the block is not stream + attention(norm(stream)), then the same with the mlp, with weights that may
        turn out to be such as these ops read; or if the device has no faster path."""
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if arch.order != "pre" or block.scale != 1.0 or not isinstance(attn, Attention) or not mlp.joins:
            return None
        if not isinstance(norms[0], Norm) or not isinstance(norms[1], Norm):
            return None
        rules = norms[0].rule(), norms[1].rule()
        may_be_few = attn.qkv.may_be_few and attn.o.may_be_few
        if rules[0] is None or rules[1] is None or not may_be_few:
            return None
        if not storage.of(few_rows)(attn.qkv.in_size, storage.dtype, ()):
            return None
        return cls(attn, mlp, (norms[0], norms[1]), (rules[0], rules[1]), storage)

    def matrices(self) -> list[Tensor | CodedWeight] | None:
        """Those of the block as loaded, experts excepted; None: one is not such as ops of ops/few.py read."""
        qkv, o, others = self.attn.qkv.read_few(), self.attn.o.read_few(), self.mlp.few_matrices()
        return None if qkv is None or o is None or others is None else [qkv[0], o[0], *others]

    @cached_property
    def rows(self) -> int:
        """Up to how many rows it is the faster one: known when the first step runs. Weights that replace them later are
        stored in the same form."""
        qkv, o, others = self.attn.qkv.read_few_parts(), self.attn.o.read_few(), self.mlp.few_matrices()
        if qkv is None or o is None or others is None:
            return 0
        return self._few_rows(self.attn.qkv.in_size, self._dtype, [*qkv[0], o[0], *others])

    def __call__(self, x: Tensor, batch: Batch, rotary: RotaryTables | None) -> Tensor:
        attn, qkv, o = self.attn, self.attn.qkv.read_few_parts(), self.attn.o.read_few()
        assert qkv is not None and o is not None
        heads = self._norm_linears(x, self.rules[0], *qkv)
        following = next(iter(self.mlp.few_matrices() or ()), None)
        stream = attn.o.own_stream(x)
        x = attn.o.summed(self._linear_add(attn.attend(heads, batch, rotary), *o, stream, following))
        return self.mlp.join(x, self.rules[1])


class InParts:
    """A block's path for some more rows: partial sums of matmuls are added up by their consumers (see ops/few.py)."""

    def __init__(self, few: Few, storage: Storage) -> None:
        self.few, self.attn, self.mlp, self.norms = few, few.attn, few.mlp, few.norms
        self._part_rows, self._dtype = storage.of(part_rows), storage.dtype
        self._linear_parts, self._added_rows = storage.of(linear_parts), storage.of(added_rows)

    @cached_property
    def rows(self) -> int:
        """Up to how many rows it is the faster one: known when the first step runs, as in `Few`."""
        matrices = self.few.matrices()
        return 0 if matrices is None else self._part_rows(self.attn.qkv.in_size, self._dtype, matrices)

    @cached_property
    def adapter_rows(self) -> int:
        """The same of steps whose rows have adapters."""
        linears, matrices = (self.attn.qkv, self.attn.o, *self.mlp.few_linears()), self.few.matrices()
        lows = [linear.low for linear in linears if linear.low is not None]
        if matrices is None or len(lows) < len(matrices):
            return 0
        return min(self.rows, self._added_rows(list(zip(matrices, lows, strict=True))))

    def __call__(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        attn, qkv, o = self.attn, self.attn.qkv.read_few(), self.attn.o.read_few()
        assert qkv is not None and o is not None
        h, x = self.norms[0].add(x, delta)
        heads = self._linear_parts(h, *qkv, attn.qkv.added(len(h)))
        out = attn.o.sum_parts(self._linear_parts(attn.attend(heads, batch, rotary), *o, attn.o.added(len(h))))
        h, x = self.norms[1].add(x, out)
        return x, self.mlp.in_parts(h)


class Rounding:
    """A block's path for many rows where inputs of matmuls are rounded to 8 bits: norms and activations do so (see
    ops/rounded.py)."""

    def __init__(self, few: Few, mlp: Mlp, storage: Storage) -> None:
        self.few, self.attn, self.mlp, self.rules = few, few.attn, mlp, few.rules
        self._rounded_rows, self._norm = storage.of(rounded_rows), storage.of(add_norm_rounded)
        self._linear, self._quantize = storage.of(rounded_parts), storage.of(quantize_rows)

    @classmethod
    def of(cls, few: Few, storage: Storage) -> Rounding | None:
        return cls(few, few.mlp, storage) if isinstance(few.mlp, Mlp) and few.mlp.is_gated else None

    @cached_property
    def rows(self) -> int:
        """From how many rows on it is the faster one, 0: never. Known when the first step runs, as in `Few`."""
        matrices = self.few.matrices()
        return 0 if matrices is None else self._rounded_rows(matrices)

    def __call__(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        attn, qkv, o = self.attn, self.attn.qkv.read_few(), self.attn.o.read_few()
        assert qkv is not None and o is not None
        weight, bias = qkv
        assert isinstance(weight, CodedWeight) and isinstance(o[0], CodedWeight)
        code = RowCode.of(weight)
        h, x = self._norm(x, delta, self.rules[0], code)
        out = attn.attend(self._linear(h, weight, bias), batch, rotary)
        codes = RoundedRows(*self._quantize(out, o[0].codes.dtype, o[0].group), out.dtype)
        h, x = self._norm(x, attn.o.sum_parts(self._linear(codes, o[0], o[1])), self.rules[1], code)
        return x, self.mlp.of_rounded(h)


class Whole:
    """The parts of a block of the common form, which a compiled call runs as a whole (see ops/blocks.py)."""

    def __init__(self, attn: Attention, mlp: Mlp, rules: tuple[NormRule, NormRule], act: str) -> None:
        self.attn, self.mlp, self.rules, self.act = attn, mlp, rules, act

    @classmethod
    def of(cls, block: DecoderBlock, arch: Arch) -> Whole | None:
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if arch.order != "pre" or block.scale != 1.0 or not arch.gated or any(arch.inner_norms):
            return None
        if not isinstance(attn, Attention) or not isinstance(mlp, Mlp) or attn.kind.gated or not attn.fusable:
            return None
        if attn.o.is_summed != mlp.down.is_summed:
            return None
        rules = tuple(norm.rule() for norm in norms if isinstance(norm, Norm))
        if len(rules) != 2 or rules[0] is None or rules[1] is None:
            return None
        return cls(attn, mlp, (rules[0], rules[1]), PLAIN[arch.act].name)

    def parts(self) -> BlockParts | None:
        """None if there is no cache yet, or some matrix is neither packed nor plain."""
        attn, mlp = self.attn, self.mlp
        qkv, o, up, down = (_weights(linear) for linear in (attn.qkv, attn.o, mlp.up, mlp.down))
        if attn.cache is None or qkv is None or o is None or up is None or down is None:
            return None
        return BlockParts(
            (qkv, o, up, down), self.rules, attn.prep(None), attn.cache, attn.kind.scale, attn.kind.softcap, attn.sinks,
            attn.alibi, self.act, _low_ranks(attn.qkv, attn.o, mlp.up, mlp.down), attn.o.reduce,
        )  # fmt: skip


def _weights(linear: Linear) -> Weights | None:
    stored = linear.stored
    return None if stored.packed is None and stored.numbers is None else Weights(stored.whole(), stored.bias)


def _low_ranks(qkv: Linear, o: Linear, up: Linear, down: Linear) -> tuple[LowRank, LowRank, LowRank, LowRank] | None:
    """None: the engine serves no adapters, or such as only the layers can add."""
    if qkv.low is None or o.low is None or up.low is None or down.low is None:
        return None
    return qkv.low, o.low, up.low, down.low


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
        x, _ = self.after_attn.add(x, self.attn(x, batch, rotary))
        return self.after_mlp.add(x, self.mlp(x))[0], None


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


class AltUpBlock(DecoderBlock):
    """A sandwich of norms on one of several streams, with a low-rank matmul beside attention (layers/altup.py). The
    stream is all of them side by side; nothing is left to add."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        from quire.layers.altup import AltUp, Laurel, LayerInput  # lazy

        super().__init__(arch, index, rope, storage)
        assert arch.altup is not None
        prefix, kind, self.index = f"model.layers.{index}.", arch.altup, index
        self.altup = AltUp(f"{prefix}altup.", arch.width, kind, arch.norm, storage)
        self.laurel = Laurel(f"{prefix}laurel.", arch.width, kind.laurel, arch.norm, storage)
        self.layer_input = LayerInput(prefix, arch.width, kind, arch.act, arch.norm, storage)
        self.active = kind.active

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        assert self.after_attn is not None and self.after_mlp is not None and batch.layer_inputs is not None
        streams = self.altup.predict(x)
        active = streams[:, self.active].contiguous()
        h = self.before_attn(active)
        beside = self.laurel(h)
        stream = (active + self.after_attn(self.attn(h, batch, rotary)) + beside) * math.sqrt(0.5)
        computed = stream + self.after_mlp(self.mlp(self.before_mlp(stream)))
        streams = self.altup.correct(streams, computed)
        added = self.layer_input(self.altup.gate_input(streams), batch.layer_inputs[:, self.index])
        streams[:, 1:] += added[:, None]
        return streams.flatten(1), None


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
        self.mlp = mlp_of(arch, layer, f"{prefix}mlp.", storage) if only_mlp else None

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
        begin = PipelineStage.of(storage.group, arch).layers.start
        self.use = SharedUse(index, arch.width, arch.shared, arch.norm, rope, storage, begin=begin)

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        x = x if delta is None else x + whole(delta)
        assert self.attn is not None
        return x, self.attn(self.norm(x + self.use(x, batch, rotary)), batch, rotary)


class ShortcutBlock(nn.Module):
    """Norm, attention, norm and mlp, twice; experts read what the first mlp reads, and are added at the end."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        layer, prefix = arch.layers[index], f"model.layers.{index}."
        self.first, self.second = (HalfBlock(arch, layer, prefix, i, rope, storage) for i in (0, 1))
        self.mlp = mlp_of(arch, layer, f"{prefix}mlp.", storage)

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Delta]:
        h, x = self.first.attend(x, delta, batch, rotary)
        aside = self.mlp(h)
        h, x = self.second.attend(x, self.first.mlp(h), batch, rotary)
        return x, self.second.mlp(h) + aside


class HalfBlock(nn.Module):
    def __init__(self, arch: Arch, layer: Layer, prefix: str, number: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        self.attn = _attention(arch, layer, f"{prefix}self_attn.{number}.", rope, storage)
        self.mlp = mlp_of(arch, replace(layer, moe=False), f"{prefix}mlps.{number}.", storage)
        self.before_attn = Norm(f"{prefix}input_layernorm.{number}", (arch.width,), arch.norm, storage)
        self.before_mlp = Norm(f"{prefix}post_attention_layernorm.{number}", (arch.width,), arch.norm, storage)

    def attend(self, x: Tensor, delta: Delta, batch: Batch, rotary: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """What the mlp reads, and the stream."""
        h, x = self.before_attn.add(x, delta)
        return self.before_mlp.add(x, self.attn(h, batch, rotary))


BLOCKS = {
    "pre": DecoderBlock, "post": DecoderBlock, "sandwich": DecoderBlock, "pre_post": DecoderBlock,
    "pre_mlp": DecoderBlock, "parallel": ParallelBlock, "after": AfterBlock, "single": SingleBlock, "kept": KeptBlock,
    "shared": SharedBlock, "altup": AltUpBlock, "shortcut": ShortcutBlock, "cross_pre": CrossBlock,
    "cross_after": CrossAfterBlock,
}  # fmt: skip


def _mixer(arch: Arch, layer: Layer, prefix: str, rope: Rope | None, storage: Storage) -> nn.Module:
    """The token mixer of a layer, called as (x, batch, rotary)."""
    if layer.mixer == "attention":
        if layer.kv_from >= 0:
            lender = f"model.layers.{layer.kv_from}.self_attn."
            kind = attention_kind(arch, layer)
            return BorrowingAttention(f"{prefix}self_attn.", arch.width, kind, rope, storage, lender=lender)
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
    if arch.mla is not None:
        m, scale = arch.mla, layer.attn_scale or arch.attn_scale or arch.head_dim**-0.5
        latent = MlaKind(
            heads=arch.heads, kv_rank=m.kv_rank, nope=m.nope, rope=m.rope, value=m.value, scale=scale,
            q_rank=m.q_rank, bias=arch.qkv_bias, latent_scale=m.latent_scale,
        )  # fmt: skip
        return LatentAttention(prefix, arch.width, latent, rope, storage)
    return Attention(prefix, arch.width, attention_kind(arch, layer), rope, storage)


def attention_kind(arch: Arch, layer: Layer) -> AttentionKind:
    return AttentionKind(
        heads=arch.heads, kv_heads=arch.kv_heads, head_dim=arch.head_dim, window=layer.window,
        scale=layer.attn_scale or arch.attn_scale or arch.head_dim**-0.5,
        chunk=layer.chunk, softcap=arch.attn_softcap, sinks=arch.sinks, alibi=arch.alibi, qkv_bias=arch.qkv_bias,
        o_bias=arch.o_bias, qk_norm=arch.qk_norm if layer.qk_norm else "", qkv_clip=arch.qkv_clip, gated=arch.attn_gate,
        qk_norm_kind=replace(arch.norm, bias=arch.qk_norm_bias, weight=arch.qk_norm_weight and arch.norm.weight),
        grow=arch.grow if layer.grow else (0.0, 1, 0), qk_norm_late=arch.qk_norm_late and layer.qk_norm,
        gate_name=arch.gate_name, out_norm=arch.inner_norms[0], v_norm=arch.v_norm,
        lends=layer.lends,
    )  # fmt: skip


def mlp_of(arch: Arch, layer: Layer, prefix: str, storage: Storage) -> Mlp | Moe:
    if layer.moe and arch.moe is not None:
        return Moe(prefix, arch.width, arch.moe, storage, act=arch.act)
    ffn = layer.ffn or arch.ffn
    if layer.sparsity:
        return SparseMlp(prefix, arch.width, ffn, storage, act=arch.act, sparsity=layer.sparsity, bias=arch.mlp_bias)
    if arch.act == "xielu":
        return XieluMlp(prefix, arch.width, ffn, storage, bias=arch.mlp_bias)
    more: dict = dict(act=arch.act, gated=arch.gated, bias=arch.mlp_bias)
    if arch.inner_norms[1]:
        return NormedMlp(prefix, arch.width, ffn, storage, norm=arch.inner_norms[1], kind=arch.norm, **more)
    return Mlp(prefix, arch.width, ffn, storage, down_bias=arch.down_bias, **more)
