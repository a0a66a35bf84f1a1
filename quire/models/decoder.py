"""The decoder: every text architecture is an Arch, and this builds and runs it.

In: a Batch. Out: hidden states [T, width], then logits for the rows the worker selects. Attention goes through the
batch's plans; weights are loaded through the table. A stage of a pipeline builds its own layers only: the first one
embeds tokens, the others read the batch's `stream`, and all but the last return the stream for the next one. Must not
know: which model it is, only fields of Arch.

    x, delta = stream and what the last sublayer adds to it; a norm joins the two (see Norm.add), so that the sum and
    the norm after it can be one kernel.

Layers are run in stretches. A `Stretch` whose blocks all have the common form (blocks.py) joins them in the first step,
and again after `forget`: whoever replaces weights or caches calls it, because a joined call holds their addresses.
Nothing is compared in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.layers.attention import KVLayer
from quire.layers.batch import Batch, GivenVectors, LayerCache
from quire.layers.embed import Embedding, Head, SinePositions
from quire.layers.kda import KdaKind
from quire.layers.linear import Linear
from quire.layers.norm import NoNorm, Norm
from quire.layers.rope import Rope, RotaryTables
from quire.layers.stored import finish_matrices
from quire.layers.table import WeightTable
from quire.layers.veto import hooks_of, vetoed
from quire.models.arch import Arch
from quire.models.blocks import BLOCKS, DecoderBlock, SharedBlock, Whole
from quire.models.layout import arrange_for
from quire.models.stage import OtherStage, PipelineStage
from quire.ops.act import tanh
from quire.ops.blocks import BlocksRun, StepTurn, join_blocks
from quire.ops.lora import AdapterRows
from quire.ops.parts import Delta, whole
from quire.quant.scheme import Storage
from quire.schema.errors import NotBuiltError
from quire.schema.kv import KVSpec

if TYPE_CHECKING:
    from quire.layers.adapters import StepAdapters
    from quire.layers.altup import AltUpKind, AltUpStreams

COMMON_NAMES = ((r"^(layers\.\d+|embed_tokens|norm)\.", r"model.\1."),)  # checkpoints saved without their head


class Stretch:
    """Consecutive layers. If all have the common form, a step whose attention supports it runs them in one call."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        ropes: Sequence[int | None],
        wholes: list[Whole],
        join: Callable[..., BlocksRun | None],
        dtype: torch.dtype,
    ) -> None:
        """`ropes[i]` is the index of layer i's rotary embedding in a step; None: it has none. `wholes`: all or none."""
        self._layers, self._ropes, self._wholes = layers, ropes, wholes
        self._join, self._dtype = join, dtype
        self._turn_keys: list[tuple[int, int | None]] = []  # group and rotary embedding
        self._call: BlocksRun | None = None
        self._is_stale = bool(wholes)

    @classmethod
    def cut(
        cls,
        layers: Iterable[nn.Module],
        ropes: Sequence[int | None],
        wholes: Sequence[Whole | None],
        storage: Storage,
        num_alone: int = 0,
    ) -> list[Stretch]:
        """All of a decoder's layers, split where runs of the common form start and end, and after each of the first
        `num_alone`."""
        join = storage.of(join_blocks)
        if join is join_blocks.reference:
            wholes = [None] * len(wholes)
        stretches = []
        numbered = enumerate(zip(layers, ropes, wholes, strict=True))
        for _, run in groupby(numbered, key=lambda entry: (min(entry[0], num_alone), entry[1][2] is None)):
            here, turned, made = zip(*(entry for _, entry in run), strict=True)
            stretches.append(cls(here, turned, [whole for whole in made if whole is not None], join, storage.dtype))
        return stretches

    def forget(self) -> None:
        """Weights or caches were replaced."""
        self._call, self._is_stale = None, bool(self._wholes)

    def __call__(
        self, x: Tensor, delta: Delta, batch: Batch, rotaries: Sequence[RotaryTables], adapters: AdapterRows | None
    ) -> tuple[Tensor, Delta]:
        """`adapters`: of the rows, in a step whose veto has no other reason."""
        if self._is_stale:
            self._make()
        if self._call is not None and (adapters is not None or not batch.through_linears):
            shared = []
            for group, rope in self._turn_keys:
                rotary = (None, None) if rope is None else rotaries[rope]
                shared.append(StepTurn(batch.plans[group], *rotary))
            if (done := self._call(x, delta, shared, adapters)) is not None:
                return done
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            x, delta = layer(x, delta, batch, None if rope is None else rotaries[rope])
        return x, delta

    def _make(self) -> None:
        self._is_stale = False
        parts = [made for whole in self._wholes if (made := whole.parts()) is not None]
        if len(parts) < len(self._wholes):
            return
        kinds = [
            (whole.attn.group, rope if whole.attn.rope is not None else None)
            for whole, rope in zip(self._wholes, self._ropes, strict=True)
        ]
        self._turn_keys = list(dict.fromkeys(kinds))
        self._call = self._join(parts, [self._turn_keys.index(kind) for kind in kinds], self._dtype)


class Tap:
    """Between two stretches: keeps the stream as the layer after it reads it, until the next step."""

    def __init__(self) -> None:
        self.state: Tensor | None = None  # [T, width]
        self.buffer: Tensor | None = None  # where graphs leave it, [most tokens of a step, width]; None: none do

    def forget(self) -> None:
        self.state = None

    def read(self, count: int) -> Tensor:
        """[count, width]: of the latest step's first tokens."""
        state = self.state if self.buffer is None else self.buffer
        assert state is not None, "no step was computed yet"
        return state[:count]

    def __call__(
        self, x: Tensor, delta: Delta, batch: Batch, rotaries: Sequence[RotaryTables], adapters: AdapterRows | None
    ) -> tuple[Tensor, Delta]:
        if self.buffer is not None:
            here = self.buffer[: len(x)]
            here.copy_(x) if delta is None else torch.add(x, whole(delta), out=here)
        else:
            self.state = x.clone() if delta is None else x + whole(delta)
        return x, delta


def position_table(arch: Arch, width: int, storage: Storage) -> nn.Module:
    if arch.position_kind in ("sines", "even_sines"):
        apart = arch.position_kind == "sines"
        return SinePositions(arch.positions, width, storage, offset=arch.position_offset, apart=apart)
    return Embedding("model.embed_positions", arch.positions, width, storage, offset=arch.position_offset)


def _modality_tokens(arch: Arch, width: int, storage: Storage) -> nn.ModuleList:
    if not arch.modality_tokens:
        return nn.ModuleList()
    from quire.layers.modality_tokens import ModalityTokens  # lazy

    return nn.ModuleList(ModalityTokens(kind, width, storage) for kind in arch.modality_tokens)


def _streams(arch: Arch, kind: AltUpKind, storage: Storage) -> AltUpStreams:
    from quire.layers.altup import AltUpStreams  # lazy

    return AltUpStreams(arch.width, len(arch.layers), kind, arch.norm, storage)


def _elsewhere() -> Any:
    """Typed as the module that another stage has in its place."""
    return OtherStage()


class Decoder(nn.Module):
    captures = True  # its forward never waits for the device: a decode step may be captured in a graph

    def __init__(self, arch: Arch, storage: Storage, *, max_model_len: int) -> None:
        super().__init__()
        self.arch, self.storage = arch, storage
        self.captures = not isinstance(arch.state, KdaKind)  # its scan waits for the device
        self.stage = PipelineStage.of(storage.group, arch)
        self._is_first, self._is_last = self.stage.is_first, self.stage.is_last
        self._make_start(arch, storage)
        self._make_layers(arch, storage, max_model_len)
        self.adapters: StepAdapters | None = None  # unless the engine serves adapters
        self._make_end(arch, storage)

    def _make_start(self, arch: Arch, storage: Storage) -> None:
        """What stands before the layers. The embedding is there for a tied head, too."""
        width, inner, here = arch.width, arch.embed_width or arch.width, self.stage.is_first
        embeds = here or (arch.tie and self.stage.is_last)
        scale = arch.embed_scale
        self.embed: Embedding = (
            Embedding("model.embed_tokens", arch.vocab, inner, storage, scale=scale, is_cut=True, in_two=arch.in_two)
            if embeds else _elsewhere()
        )  # fmt: skip
        self.modality_tokens = _modality_tokens(arch, inner, storage) if here else nn.ModuleList()
        self.positions = position_table(arch, arch.width, storage) if arch.positions and here else None
        narrow = bool(arch.embed_width) and here
        self.project_in = Linear("model.", inner, {"project_in": width}, storage) if narrow else None
        self.streams = None if arch.altup is None else _streams(arch, arch.altup, storage)
        self.embed_norm = Norm("model.embed_norm", (width,), arch.norm, storage) if arch.embed_norm and here else None

    def _make_layers(self, arch: Arch, storage: Storage, max_model_len: int) -> None:
        """`layers[i]` is layer i of the model; those of other stages are empty."""
        kinds: list = []  # distinct rotary kinds, in order of first use
        for layer in (arch.layers[i] for i in self.stage.layers):
            if layer.rope is not None and layer.rope not in kinds:
                kinds.append(layer.rope)
        ropes = [Rope(kind, max_model_len, storage) for kind in kinds]
        self.ropes = nn.ModuleList(ropes)
        self._rotary_tables = [rope.tables for rope in ropes]
        self.layers = nn.ModuleList(OtherStage() for _ in arch.layers)
        self.rope_of: list[int | None] = [None] * len(arch.layers)
        for i in self.stage.layers:
            layer = arch.layers[i]
            which = self.rope_of[i] = None if layer.rope is None else kinds.index(layer.rope)
            layer_arch = replace(arch, order=layer.order or arch.order)
            self.layers[i] = BLOCKS[layer_arch.order](layer_arch, i, None if which is None else ropes[which], storage)
        own = [self.layers[i] for i in self.stage.layers]
        uses = [layer.use for layer in own if isinstance(layer, SharedBlock)]
        for use in uses:
            use.link(uses)
        if arch.deepstack and self.stage.count > 1:
            raise NotBuiltError("vectors that are added after several layers are not built for a pipeline of stages",
                                param="pipeline_parallel_size")  # fmt: skip
        self._stretches: list[Stretch | Tap] = [*self._cut(self.stage.layers, arch.deepstack)]
        self._hooks = hooks_of(self.layers.modules())
        last = own[-1] if own and self.stage.is_last else None
        if type(last) is DecoderBlock and not arch.deepstack and arch.altup is None:
            last.is_end = True

    def _cut(self, layers: range, deepstack: int = 0) -> list[Stretch]:
        own = [self.layers[i] for i in layers]
        wholes = [layer.whole if type(layer) is DecoderBlock else None for layer in own]
        return Stretch.cut(own, [self.rope_of[i] for i in layers], wholes, self.storage, deepstack)

    def tap(self, layers: Sequence[int]) -> list[Tap]:
        """From now on every step keeps what enters these layers, which are in rising order."""
        if self.arch.deepstack:
            raise NotBuiltError("drafts from hidden states are not built for models whose media are added after layers",
                                param="speculative_config")  # fmt: skip
        if self.arch.altup is not None:
            raise NotBuiltError("drafts from hidden states are not built for models with several streams",
                                param="speculative_config")  # fmt: skip
        taps = [Tap() for _ in layers]
        ends = [*layers, len(self.layers)]
        self._stretches = [*self._cut(range(ends[0]))] if ends[0] else []
        for tap, start, end in zip(taps, ends, ends[1:], strict=False):
            self._stretches += [tap, *self._cut(range(start, end))]
        return taps

    def _make_end(self, arch: Arch, storage: Storage) -> None:
        """What stands behind the layers."""
        width, inner, here = arch.width, arch.embed_width or arch.width, self.stage.is_last
        self.norm: Norm | NoNorm = NoNorm()
        if arch.final_norm:
            self.norm = Norm("model.norm", (width,), arch.norm, storage) if here else _elsewhere()
        narrow = bool(arch.embed_width) and here
        self.project_out = Linear("model.", width, {"project_out": inner}, storage) if narrow else None
        self._tanh = storage.of(tanh)
        tied = self.embed if arch.tie else None
        rows = arch.vocab - arch.input_only
        self.head: Head = (
            Head("lm_head", rows, inner, storage, bias=arch.head_bias, tied=tied) if here else _elsewhere()
        )

    @property
    def stream_width(self) -> int:
        """Of what a stage hands to the next one: the stream, and the embedding where layers read that again."""
        return self.arch.width * (1 if self.arch.shared is None else 2)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, width of the head]; of a stage that is not the last, [T, stream_width] for the next."""
        if batch.adapter_index is not None and self.adapters is None:
            raise NotBuiltError("a step uses adapters, and the engine was started without enable_lora")
        if any(self._hooks):
            batch = vetoed(batch)
        adapters: AdapterRows | None = None  # for blocks in one call
        if self.adapters is not None:
            self.adapters.begin(batch.adapter_index, is_captured=batch.is_captured)
            adapters = None if batch.through_linears or self.adapters.is_sharded else self.adapters.rows
        if batch.adapter_index is not None:
            batch = vetoed(batch, only_adapters=True)
        where, channels = batch.positions, batch.position_channels
        if channels is None:
            rotaries = [RotaryTables(*tables(where)) for tables in self._rotary_tables]
        else:
            rotaries = [rope(where, channels) for rope in self.ropes]
        x = self._embedded(batch) if self._is_first else batch.stream
        assert x is not None, "a stage got no stream from the one before"
        if self.arch.shared is not None:
            embedded = x
            if not self._is_first:
                x, embedded = (part.contiguous() for part in x.split(self.arch.width, -1))
            batch = replace(batch, embedded=embedded)
        if self.streams is not None:
            batch = replace(batch, layer_inputs=self.streams.layer_inputs(batch.token_ids, x), lent={})
            x = self.streams.open(x)
        delta: Delta = None
        deep = batch.input_vectors if self.arch.deepstack else None
        for index, stretch in enumerate(self._stretches):
            x, delta = stretch(x, delta, batch, rotaries, adapters)
            if deep is not None and index < self.arch.deepstack:
                x, delta = self._deepened(x if delta is None else x + whole(delta), deep, index + 1), None
        if not self._is_last:
            x = x if delta is None else x + whole(delta)
            return x if batch.embedded is None else torch.cat((x, batch.embedded), -1)
        if self.streams is not None:
            x = self.streams.close(x if delta is None else x + whole(delta))
            delta = None
        x = self.norm(x) if delta is None else self.norm.joined(x, delta)[0]
        return x if self.project_out is None else self.project_out(x)

    def _deepened(self, x: Tensor, deep: GivenVectors, which: int) -> Tensor:
        """Further vectors of media, of which each layer that takes some has its own columns."""
        width = self.arch.width
        return x.index_add(0, deep.places, deep.vectors[:, which * width : (which + 1) * width].to(x.dtype))

    def _embedded(self, batch: Batch) -> Tensor:
        """[T, width] as the first layer reads it."""
        x = self.embed(batch.token_ids)
        for tokens in self.modality_tokens:
            x = tokens(batch.token_ids, x)
        if batch.input_vectors is not None:
            places, vectors = batch.input_vectors
            x = x.index_copy(0, places, vectors[:, : x.shape[1]].to(x.dtype))
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        return x if self.embed_norm is None else self.embed_norm(x)

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """[S, width] -> [S, vocab] float32. `slots` [S]: of the rows' adapters; None: no row has one."""
        return self.narrow_logits(hidden, slots).float()

    def narrow_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """The same in the head's dtype, without converting to float32, if nothing follows the head."""
        logits = self.head(hidden, slots)
        if self.arch.logit_scale != 1.0 or self.arch.logit_softcap:
            logits = self._scaled(logits.float())
        if self.arch.input_only:
            logits = nn.functional.pad(logits, (0, self.arch.input_only), value=-torch.inf)
        return logits

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.arch.logit_scale != 1.0:
            logits = logits * self.arch.logit_scale
        cap = self.arch.logit_softcap
        return self._tanh(logits / cap) * cap if cap else logits

    def table(self) -> WeightTable:
        self.forget_addresses()
        arch = self.arch
        ignore = (*arch.ignore, r"^lm_head\.weight$") if arch.tie else arch.ignore
        return WeightTable.of(
            self, names=(*arch.names, *COMMON_NAMES), ignore=ignore, arrange=arrange_for(arch),
            elsewhere=self.stage.elsewhere(arch), unread=arch.unread,
        )  # fmt: skip

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
