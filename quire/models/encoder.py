"""Encoders: the decoder's blocks with bidirectional attention, without a cache.

In: Texts, or features of a recording. Out: hidden states [T, width], text after text. Weights are loaded through the
same table as a decoder's. Pooling of hidden states (a mean, a first token, a class) is up to the caller
(models/pooled.py). Must not know: which model it is, only fields of EncoderArch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.layers.attention import Attention
from quire.layers.audio_stem import AudioStem
from quire.layers.batch import Batch
from quire.layers.embed import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import NoNorm, Norm
from quire.layers.packed import Texts, WithinPlan
from quire.layers.relative import LayerScores, RelativeKind
from quire.layers.rope import Rope
from quire.layers.stored import finish_matrices
from quire.layers.table import WeightTable
from quire.layers.veto import hooks_of, vetoed
from quire.models.arch import Arch
from quire.models.blocks import BLOCKS
from quire.models.decoder import position_table
from quire.models.layout import arrange_for
from quire.models.limits import check_arch, reading
from quire.models.view import View
from quire.models.zoo import ENCODERS
from quire.ops.op import Kernels
from quire.quant.plain import plain_storage
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError, InputError

if TYPE_CHECKING:
    from quire.layers.adapters import StepAdapters


@dataclass(frozen=True)
class EncoderArch:
    """The parts of an encoder besides its layers. In `core`, a layer's window extends to either side."""

    core: Arch
    types: int = 0  # rows of a table of token types
    first_norm: bool = True  # False: the first layer reads the embeddings without a norm
    relative: RelativeKind | None = None  # scores by distance
    inner_bias: bool = False  # the projection of a narrower token table has a bias
    bins: int = 0  # of the features of audio, which it reads instead of text; 0: it reads text


class Encoder(nn.Module):
    def __init__(self, arch: EncoderArch, storage: Storage, *, max_model_len: int) -> None:
        super().__init__()
        self.arch, self.storage, core = arch, storage, arch.core
        self.adapters: StepAdapters | None = None  # unless the engine serves adapters
        width, inner = core.width, core.embed_width or core.width
        self.embed = Embedding("model.embed_tokens", core.vocab, inner, storage, scale=core.embed_scale)
        self.stem = AudioStem("model.", arch.bins, width, storage) if arch.bins else None
        self.positions = position_table(core, inner, storage) if core.positions else None
        self.types = Embedding("model.embed_types", arch.types, inner, storage) if arch.types else None
        self.embed_norm = Norm("model.embed_norm", (inner,), core.norm, storage) if core.embed_norm else None
        self.project_in = (
            Linear("model.", inner, {"project_in": width}, storage, bias=arch.inner_bias) if core.embed_width else None
        )
        kinds: list = []  # distinct rotary kinds, in order of first use
        for layer in core.layers:
            if layer.rope is not None and layer.rope not in kinds:
                kinds.append(layer.rope)
        ropes = [Rope(kind, max_model_len, storage) for kind in kinds]
        self.ropes = nn.ModuleList(ropes)
        self.rope_of = [None if layer.rope is None else kinds.index(layer.rope) for layer in core.layers]
        self.windows = list(dict.fromkeys(layer.window for layer in core.layers))
        self.layers = nn.ModuleList()
        for i, (layer, which) in enumerate(zip(core.layers, self.rope_of, strict=True)):
            block = BLOCKS[core.order](core, i, None if which is None else ropes[which], storage)
            if isinstance(block.attn, Attention):
                block.attn.group = self.windows.index(layer.window)
            if i == 0 and not arch.first_norm:
                block.before_attn = NoNorm()
            self.layers.append(block)
        self._hooks = hooks_of(self.layers.modules())
        self.norm = Norm("model.norm", (width,), core.norm, storage) if core.final_norm else NoNorm()
        self.relative = (
            LayerScores("model.relative", core.heads, arch.relative, storage, layers=len(core.layers), both_ways=True)
            if arch.relative
            else None
        )

    @torch.no_grad()
    def forward(self, texts: Texts) -> Tensor:
        """Hidden states [T, width]."""
        if self.adapters is not None:
            self.adapters.begin(texts.adapter_index)
        positions = self._positions(texts)
        return self._through(self._embedded(texts, positions), texts.token_ids, positions, texts.lens)

    @torch.no_grad()
    def read_with(self, texts: Texts, places: Tensor, vectors: Tensor) -> Tensor:
        """The same with vectors in place of the embeddings of some tokens."""
        core = self.arch.core
        num, width = int(places.sum()), core.embed_width or core.width
        if tuple(vectors.shape) != (num, width):
            raise InputError(
                f"vectors of shape {list(vectors.shape)}; the encoder's text has places for {num} of {width}"
            )
        positions = self._positions(texts)
        x = self._embedded(texts, positions, places, vectors)
        return self._through(x, texts.token_ids, positions, texts.lens)

    def _positions(self, texts: Texts) -> Tensor:
        if (longest := max(texts.lens)) > self.arch.core.max_positions:
            raise InputError(
                f"a text of {longest} tokens is longer than the model's maximum ({self.arch.core.max_positions})",
                value=longest,
            )
        return texts.positions()

    @torch.no_grad()
    def listen(self, features: Tensor) -> Tensor:
        """Hidden states [frames / 2, width] of one recording's features [bins, frames]."""
        core, stem = self.arch.core, self.stem
        if stem is None or self.positions is None:
            raise InputError("this encoder reads text, not audio")
        if features.ndim != 2 or features.shape[0] != stem.bins or not 2 <= features.shape[1] <= 2 * core.positions:
            raise InputError(
                f"features of audio have the shape {list(features.shape)}; expected {stem.bins} bins and 2 to "
                f"{2 * core.positions} frames"
            )
        x = stem(features.to(self.storage.dtype))
        positions = torch.arange(len(x), device=x.device)
        return self._through(x + self.positions(positions), positions, positions, (len(x),))

    def _through(self, x: Tensor, token_ids: Tensor, positions: Tensor, lens: Sequence[int]) -> Tensor:
        """All layers, over vectors that lie text after text."""
        batch = Batch(
            token_ids=token_ids, positions=positions, logit_index=positions[:0], num_tokens=len(positions),
            plans=[WithinPlan(lens, window) for window in self.windows],
        )  # fmt: skip
        if any(self._hooks) or (self.adapters is not None and self.adapters.rows is not None):
            batch = vetoed(batch)
        rotaries, delta = [rope(positions) for rope in self.ropes], None
        for layer, which in zip(self.layers, self.rope_of, strict=True):
            x, delta = layer(x, delta, batch, None if which is None else rotaries[which])
        return self.norm.add(x, delta)[0]

    def _embedded(
        self, texts: Texts, positions: Tensor, places: Tensor | None = None, vectors: Tensor | None = None
    ) -> Tensor:
        x = self.embed(texts.token_ids)
        if places is not None and vectors is not None:
            x = x.masked_scatter(places[:, None], vectors.to(x.dtype))
        if self.types is not None:
            x = x + self.types(torch.zeros_like(texts.token_ids) if texts.type_ids is None else texts.type_ids)
        elif texts.type_ids is not None and bool(texts.type_ids.any()):
            raise InputError("this model has no token types, but some are not 0")
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return x if self.project_in is None else self.project_in(x)

    def table(self) -> WeightTable:
        core = self.arch.core
        return WeightTable.of(self, names=core.names, ignore=core.ignore, arrange=arrange_for(core))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from (checkpoint name, tensor) pairs, all or some; returns the names that were used."""
        taken = self.table().load_all(weights)
        self.finish_weights()
        return taken

    @torch.no_grad()
    def finish_weights(self) -> None:
        """To be called once parameters are filled through the table."""
        finish_matrices(self)
        if self.relative is not None:
            for layer, scores in zip(self.layers, self.relative.scores(), strict=True):
                if isinstance(layer.attn, Attention):
                    layer.attn.use_scores(scores)


def encoder_arch(hf_config: Mapping[str, Any]) -> EncoderArch | None:
    """The declaration of the first encoder named in config["architectures"]; None: there is none."""
    for name in hf_config.get("architectures") or []:
        if name in ENCODERS:
            with reading(hf_config, name):
                arch: EncoderArch = ENCODERS.get(name)(View(hf_config, {}, name))
                check_arch(arch.core)
            return arch
    return None


def build_encoder(
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    storage: Storage | None = None,
) -> Encoder:
    """As models/build.build_model, for an encoder."""
    arch = encoder_arch(hf_config)
    if arch is None:
        raise ConfigError(
            f"no encoder is declared under {hf_config.get('architectures')}; declared: {', '.join(ENCODERS.names())}",
            param="architectures",
        )
    if any(layer.mixer != "attention" for layer in arch.core.layers):
        raise ConfigError("an encoder's layers must be attention; recurrent states are unidirectional")
    storage = storage or plain_storage(dtype, Kernels.here(device))
    return Encoder(arch, storage, max_model_len=max_model_len or arch.core.max_positions)
