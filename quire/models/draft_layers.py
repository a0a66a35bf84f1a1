"""Drafters with layers of their own that go on from a model's hidden states: EAGLE, EAGLE-3, multi-token prediction.

Position p of a drafter's text is a pair: the hidden state that the model has at p, and the token at p + 1, which the
state led to. Out of them comes a state that stands for the one the model will have at p + 1, and from it the token
at p + 2. So a drafter goes on by itself: its own state takes the place of the model's. Embedding and head are the
model's where a checkpoint has none. Must not know: files, rows, which of its tokens are right.

    eagle    x = fc [embedding | state]; layers, the first without its first norm; head
    eagle3   state = fc [three inner states of the model]; the first layer attends over [norm(embedding) | norm(state)]
             and adds to the state; norm; head over a vocabulary of its own (d2t)
    mtp      x = proj [norm(embedding) | norm(state)]; a layer of the model's kind; norm; the model's head
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.checkpoint.limits import VOCAB, WIDTH, check_number
from quire.layers.attention import Attention, KVLayer
from quire.layers.batch import Batch, LayerCache
from quire.layers.embed import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.rope import Rope, RotaryTables
from quire.layers.stored import finish_matrices
from quire.layers.table import WeightTable
from quire.models.arch import Arch, Layer
from quire.models.blocks import BLOCKS, attention_kind, mlp_of
from quire.models.build import architecture_name, read_arch
from quire.models.decoder import COMMON_NAMES, Decoder
from quire.models.draft_heads import TokenMap
from quire.models.layout import arrange_for
from quire.ops.parts import Delta, whole
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.kv import KVSpec

_PLACE = "speculative_config"
OfStates = Callable[[Tensor], Tensor]


class Target(NamedTuple):
    """What a drafter uses of the model it drafts for; adapters have no part in it."""

    width: int
    vocab: int
    num_layers: int
    embed: Callable[[Tensor], Tensor]
    norm: OfStates
    logits: OfStates

    @classmethod
    def of(cls, model: Decoder) -> Target:
        arch, table = model.arch, model.embed
        if arch.embed_width and arch.embed_width != arch.width:
            raise NotBuiltError(
                f"{_PLACE}: the model's embedding is {arch.embed_width} wide and its states are {arch.width}; drafters "
                "that share it are built for models where both are the same",
                param=_PLACE,
            )

        def embed(token_ids: Tensor) -> Tensor:
            return table.take(token_ids)

        def logits(states: Tensor) -> Tensor:
            return model.narrow_logits(states)

        def norm(states: Tensor) -> Tensor:
            return model.norm(states)

        return cls(arch.width, arch.vocab, len(arch.layers), embed, norm, logits)


class FeatureDrafter(nn.Module):
    """What all of them share. A kind says what comes before its layers (`_begin`), and which norm follows them."""

    role = "drafter"
    captures = False

    def __init__(self, arch: Arch, layers: range, target: Target, storage: Storage, max_model_len: int) -> None:
        """`layers`: those of `arch` that it has."""
        super().__init__()
        self.arch, self.storage, self.target = arch, storage, target
        self.taps: tuple[int, ...] = ()  # layers of the model whose input it reads; none: what the model gives
        self.state_width = target.width  # of what it reads, all taps together
        kinds = list(dict.fromkeys(rope for i in layers if (rope := arch.layers[i].rope) is not None))
        self.ropes = nn.ModuleList(Rope(kind, max_model_len, storage) for kind in kinds)
        self._rope_of = [None if (rope := arch.layers[i].rope) is None else kinds.index(rope) for i in layers]
        self.layers = nn.ModuleList(
            self._block(arch, i, None if at is None else self._rope(at), storage)
            for i, at in zip(layers, self._rope_of, strict=True)
        )
        self.embed: Embedding | None = None  # None: the model's
        self.head: Head | None = None
        self.map: TokenMap | None = None
        self.names: tuple[tuple[str, str], ...] = (*arch.names, *COMMON_NAMES)
        self.ignore: tuple[str, ...] = arch.ignore

    def _rope(self, at: int) -> Rope:
        rope = self.ropes[at]
        assert isinstance(rope, Rope)
        return rope

    def _block(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> nn.Module:
        order = arch.layers[index].order or arch.order
        return BLOCKS[order](replace(arch, order=order), index, rope, storage)

    # ---- computing -----------------------------------------------------------------------------------------------

    def fuse(self, states: Tensor) -> Tensor:
        """[T, state_width] of the model -> [T, width] as `forward` takes them."""
        return states

    def forward(self, batch: Batch, states: Tensor) -> Tensor:
        """A step over pairs: tokens of the batch, and the state before each [T, width]. Out: the states after them."""
        tables = [RotaryTables(*self._rope(at).tables(batch.positions)) for at in range(len(self.ropes))]
        turns = [None if at is None else tables[at] for at in self._rope_of]
        x, delta = self._begin(batch, states, turns[0])
        for layer, turn in zip(self._rest(), turns[len(turns) - len(self._rest()) :], strict=True):
            x, delta = layer(x, delta, batch, turn)
        return self._end(x if delta is None else x + whole(delta))

    def _begin(self, batch: Batch, states: Tensor, turn: RotaryTables | None) -> tuple[Tensor, Delta]:
        raise NotImplementedError

    def _rest(self) -> Sequence[nn.Module]:
        """The layers that `_begin` has not run."""
        return list(self.layers)

    def _end(self, states: Tensor) -> Tensor:
        """As the drafter reads it again."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[S, width] that `forward` gave -> [S, v]. The ids are its own where it has a `map`."""
        return self.target.logits(states) if self.head is None else self.head(states)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids) if self.embed is None else self.embed(token_ids)

    # ---- as every model ------------------------------------------------------------------------------------------

    def table(self) -> WeightTable:
        return WeightTable.of(self, names=self.names, ignore=self.ignore, arrange=arrange_for(self.arch))

    def finish_weights(self) -> None:
        finish_matrices(self)
        if self.map is not None:
            self.map.check()

    def kv_layers(self) -> list[KVLayer]:
        return [module for module in self.modules() if isinstance(module, KVLayer)]

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        return [layer.kv_spec(block_size, kv_dtype) for layer in self.kv_layers()]

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        for layer in self.kv_layers():
            layer.bind(caches[layer.layer], groups[layer.layer])


# ---- EAGLE -------------------------------------------------------------------------------------------------------


class Eagle(FeatureDrafter):
    def __init__(
        self, raw: Mapping[str, Any], there: Collection[str], target: Target, storage: Storage, max_model_len: int
    ) -> None:
        """`raw`: its configuration; `there`: names of the checkpoint's tensors."""
        arch = read_arch(raw)
        first = replace(arch.layers[0], order="pre_mlp")
        arch = replace(arch, layers=(first, *arch.layers[1:]), tie=False)
        _check_width(arch.width, target)
        super().__init__(arch, range(len(arch.layers)), target, storage, max_model_len)
        self.names = (
            (r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0."), (r"^model\.fc\.", "fc."), *self.names,
        )  # fmt: skip
        self.ignore = (*self.ignore, *_unused(there))
        self.fc = Linear("", 2 * arch.width, {"fc": arch.width}, storage, bias=_has(there, "fc.bias", "fusion_fc.bias"))
        self.embed, self.head = _own_ends(arch, arch.vocab, there, storage)

    def _begin(self, batch: Batch, states: Tensor, turn: RotaryTables | None) -> tuple[Tensor, Delta]:
        return self.fc(torch.cat((self._embedded(batch.token_ids), states), -1)), None


class Eagle3Block(nn.Module):
    """Attention over [norm(embedding) | norm(state)], whose output is added to the state; then norm and mlp."""

    def __init__(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> None:
        super().__init__()
        layer, prefix = arch.layers[index], f"model.layers.{index}."
        self.attn = Attention(
            f"{prefix}self_attn.", 2 * arch.width, attention_kind(arch, layer), rope, storage, out_width=arch.width
        )
        self.mlp = mlp_of(arch, layer, f"{prefix}mlp.", storage)
        self.before_embed = Norm(f"{prefix}input_layernorm", (arch.width,), arch.norm, storage)
        self.before_state = Norm(f"{prefix}hidden_norm", (arch.width,), arch.norm, storage)
        self.before_mlp = Norm(f"{prefix}post_attention_layernorm", (arch.width,), arch.norm, storage)
        self.keeps_norm = False  # the stream is the norm of the state, not the state itself

    def run(self, embedded: Tensor, x: Tensor, batch: Batch, turn: RotaryTables | None) -> tuple[Tensor, Delta]:
        h = self.before_state(x)
        out = self.attn(torch.cat((self.before_embed(embedded), h), -1), batch, turn)
        h, x = self.before_mlp.add(h if self.keeps_norm else x, out)
        return x, self.mlp(h)


class Eagle3(FeatureDrafter):
    def __init__(
        self, raw: Mapping[str, Any], there: Collection[str], target: Target, storage: Storage, max_model_len: int
    ) -> None:
        arch = replace(read_arch(raw), tie=False)
        super().__init__(arch, range(len(arch.layers)), target, storage, max_model_len)
        self.names = ((r"^midlayer\.", "layers.0."), *self.names)
        self.ignore = (*self.ignore, r"^t2d$", r"^verifier_", *_unused(there))
        self.taps = _taps(raw, target.num_layers)
        read_width = raw.get("target_hidden_size") or arch.width
        check_number("target_hidden_size", read_width, WIDTH)
        _check_width(read_width, target)
        self.state_width = len(self.taps) * read_width
        self.fc = Linear("", self.state_width, {"fc": arch.width}, storage, bias=_has(there, "fc.bias"))
        self.norm = Norm("model.norm", (arch.width,), arch.norm, storage)
        self._first().keeps_norm = bool(raw.get("norm_before_residual", False))
        vocab = raw.get("draft_vocab_size") or arch.vocab
        check_number("draft_vocab_size", vocab, VOCAB)
        self.embed, self.head = _own_ends(arch, vocab, there, storage)
        if self.head is not None and (vocab != target.vocab or _has(there, "d2t")):
            self.map = TokenMap("d2t", vocab, target.vocab, storage, offsets=True)
        if arch.width != target.width and (self.embed is None or self.head is None):
            raise ConfigError(
                f"{_PLACE}: the drafter is {arch.width} wide and the model {target.width}, so its checkpoint must have "
                "an embedding and a head of its own",
                param=_PLACE,
            )

    def _first(self) -> Eagle3Block:
        first = self.layers[0]
        assert isinstance(first, Eagle3Block)
        return first

    def _block(self, arch: Arch, index: int, rope: Rope | None, storage: Storage) -> nn.Module:
        if index == 0:
            return Eagle3Block(arch, index, rope, storage)
        return super()._block(arch, index, rope, storage)

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def _begin(self, batch: Batch, states: Tensor, turn: RotaryTables | None) -> tuple[Tensor, Delta]:
        return self._first().run(self._embedded(batch.token_ids), states, batch, turn)

    def _rest(self) -> Sequence[nn.Module]:
        return list(self.layers)[1:]

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.norm(states))


def _taps(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of the model whose input is read: as configured, else an early one, the middle, and a late one."""
    inner = raw.get("eagle_config")
    chosen = raw.get("eagle_aux_hidden_state_layer_ids")
    if chosen is None and isinstance(inner, Mapping):
        chosen = inner.get("eagle_aux_hidden_state_layer_ids")
    layers = (2, num_layers // 2, num_layers - 3) if chosen is None else chosen
    is_list = isinstance(layers, list | tuple) and 0 < len(layers) <= 16
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) for one in layers):
        raise ConfigError(
            f"{_PLACE}: eagle_aux_hidden_state_layer_ids is {layers!r:.100}; expected up to 16 numbers of layers",
            param=_PLACE,
        )
    rising = all(a < b for a, b in pairwise(layers))
    if not rising or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(
            f"{_PLACE}: the drafter reads what enters the layers {list(layers)} of the model, which has {num_layers}; "
            "they must be in it, and in rising order",
            param=_PLACE,
        )
    return tuple(layers)


def _own_ends(
    arch: Arch, head_vocab: int, there: Collection[str], storage: Storage
) -> tuple[Embedding | None, Head | None]:
    """Embedding and head of the checkpoint; None where it has none."""
    table = Embedding("model.embed_tokens", arch.vocab, arch.width, storage) if _has(there, *_EMBEDS) else None
    head = Head("lm_head", head_vocab, arch.width, storage) if _has(there, *_HEADS) else None
    return table, head


_EMBEDS, _HEADS = ("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight",)


def _has(there: Collection[str], *names: str) -> bool:
    return any(name in there for name in names)


def _unused(there: Collection[str]) -> tuple[str, ...]:
    """Buffers that training leaves in checkpoints."""
    return tuple(rf"^{name}$" for name in ("hidden_norm", "training_step") if name in there)


def _check_width(width: int, target: Target) -> None:
    if width != target.width:
        raise ConfigError(
            f"{_PLACE}: the drafter reads hidden states of {width} numbers, and the model's have {target.width}",
            param=_PLACE,
        )


# ---- multi-token prediction --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MtpKind:
    """Names of the module that follows the last layer {n}, and what it computes beside its layer."""

    names: tuple[tuple[str, str], ...] = ()  # patterns -> names under model.layers.{n}.
    states_first: bool = False  # in the input of the projection
    end_norm: str = "shared_head.norm"  # '': the model's own final norm
    dense: bool = False  # no experts in its layer
    order: str = ""  # of the layer's norms; '': as in the model's own
    ignore: tuple[str, ...] = ()


_DEEPSEEK = MtpKind(ignore=(r"\.embed_tokens\.", r"\.shared_head\.head\.", r"\.self_attn\.indexer\."))
_MIMO = MtpKind(
    names=(
        (r"^model\.mtp_layers\.0\.token_layernorm\.", "model.layers.{n}.enorm."),
        (r"^model\.mtp_layers\.0\.hidden_layernorm\.", "model.layers.{n}.hnorm."),
        (r"^model\.mtp_layers\.0\.input_proj\.", "model.layers.{n}.eh_proj."),
        (r"^model\.mtp_layers\.0\.", "model.layers.{n}."),
    ),
    states_first=True, end_norm="final_layernorm",
)  # fmt: skip
_ERNIE = MtpKind(
    names=(
        (r"^model\.mtp_emb_norm\.0\.", "model.layers.{n}.enorm."),
        (r"^model\.mtp_hidden_norm\.0\.", "model.layers.{n}.hnorm."),
        (r"^model\.mtp_linear_proj\.0\.", "model.layers.{n}.eh_proj."),
        (r"^model\.mtp_block\.0\.", "model.layers.{n}."),
    ),
    end_norm="", dense=True,
)  # fmt: skip
_QWEN_NEXT = MtpKind(
    names=(
        (r"^(model\.)?mtp\.pre_fc_norm_embedding\.", "model.layers.{n}.enorm."),
        (r"^(model\.)?mtp\.pre_fc_norm_hidden\.", "model.layers.{n}.hnorm."),
        (r"^(model\.)?mtp\.fc\.", "model.layers.{n}.eh_proj."),
        (r"^(model\.)?mtp\.norm\.", "model.layers.{n}.shared_head.norm."),
        (r"^(model\.)?mtp\.layers\.0\.", "model.layers.{n}."),
    ),
)  # fmt: skip
_LONGCAT = MtpKind(
    names=(
        (r"^model\.mtp\.layers\.0\.([eh]norm)\.m\.", r"model.layers.{n}.\1."),
        (r"^model\.mtp\.layers\.0\.transformer_layer\.", "model.layers.{n}."),
        (r"^model\.mtp\.layers\.0\.", "model.layers.{n}."),
        (r"^model\.mtp\.norm\.", "model.layers.{n}.shared_head.norm."),
    ),
    dense=True, order="pre",
)  # fmt: skip
MTP = {
    **dict.fromkeys(
        ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
         "GlmMoeDsaForCausalLM"), _DEEPSEEK),
    "MiMoForCausalLM": _MIMO,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _QWEN_NEXT),
    "LongcatFlashForCausalLM": _LONGCAT,
}  # fmt: skip


class Mtp(FeatureDrafter):
    """The first module for multi-token prediction of a model's own checkpoint; others are not read."""

    def __init__(
        self, raw: Mapping[str, Any], there: Collection[str], model: Decoder, storage: Storage, max_model_len: int
    ) -> None:
        """`raw`: the model's configuration."""
        name, target, arch = architecture_name(raw), Target.of(model), model.arch
        if name not in MTP:
            raise NotBuiltError(
                f"{_PLACE}: method 'mtp' is built for {', '.join(MTP)}, and this model is {name}", param=_PLACE
            )
        kind, n = MTP[name], len(arch.layers)
        like = next(layer for layer in reversed(arch.layers) if layer.mixer == "attention")  # beside states, too
        own: Layer = replace(like, moe=like.moe and not kind.dense, order=kind.order)
        arch = replace(arch, layers=(*arch.layers, own))
        super().__init__(arch, range(n, n + 1), target, storage, max_model_len)
        prefix, width = f"model.layers.{n}.", arch.width
        self.names = (*((pattern, new.format(n=n)) for pattern, new in kind.names), *self.names)
        self.ignore = kind.ignore
        self._prefix, self._states_first = prefix, kind.states_first
        self.embed_norm = Norm(f"{prefix}enorm", (width,), arch.norm, storage)
        self.state_norm = Norm(f"{prefix}hnorm", (width,), arch.norm, storage)
        bias = any(name.endswith((f"layers.{n}.eh_proj.bias", "mtp_linear_proj.0.bias")) for name in there)
        self.join = Linear(prefix, 2 * width, {"eh_proj": width}, storage, bias=bias)
        self.norm = Norm(f"{prefix}{kind.end_norm}", (width,), arch.norm, storage) if kind.end_norm else None

    def _begin(self, batch: Batch, states: Tensor, turn: RotaryTables | None) -> tuple[Tensor, Delta]:
        pair = self.embed_norm(self._embedded(batch.token_ids)), self.state_norm(states)
        return self.join(torch.cat(pair[::-1] if self._states_first else pair, -1)), None

    def _end(self, states: Tensor) -> Tensor:
        """Behind the norm, as the states of the model are."""
        return self.target.norm(states) if self.norm is None else self.norm(states)

    def table(self) -> WeightTable:
        return WeightTable.of(
            self, names=self.names, ignore=self.ignore, arrange=arrange_for(self.arch),
            elsewhere=lambda name: not name.startswith(self._prefix),
        )  # fmt: skip
