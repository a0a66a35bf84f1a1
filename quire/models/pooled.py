"""Pooling models: the trunk of a decoder or an encoder, and the head that its vectors go through.

In: a Batch (causal trunks) or Texts (those that read both ways). Out: hidden states [T, width]; then, of the vectors
that the worker pooled from them, embeddings or logits in float32. Weights are loaded through one table. Must not know:
which positions are pooled (worker/pooling_runner.py), files, options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.batch import Batch, LayerCache
from quire.layers.embed import Head
from quire.layers.packed import Texts
from quire.layers.table import WeightTable, slots_of
from quire.models.arch import Arch, each
from quire.models.build import read_arch
from quire.models.decoder import COMMON_NAMES, Decoder
from quire.models.encoder import Encoder, EncoderArch, encoder_arch
from quire.models.heads import HeadDense, HeadLayer, PoolingHead, check_layers, head_layers, term_head
from quire.models.zoo import ENCODERS, ZOO
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError
from quire.schema.kv import KVSpec

_ENDS = (
    "ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel", "RewardModel",
    "ForTextEncoding", "EmbeddingModel", "TextModel", "Model",
)  # fmt: skip
_TERM_ROWS = 128  # tokens whose logits are computed at a time
_GENERATING = ("ForCausalLM", "LMHeadModel")
# Heads of checkpoints that are used for something else.
_OTHER_HEADS = (
    r"^(model\.)?(lm_head|score|classifier|v_head|linear|dense|embed_out)\.", r"^(model\.)?(score|v_head)$",
)  # fmt: skip


@dataclass(frozen=True)
class PoolingKind:
    """What a pooling model is built for."""

    classifies: bool = False  # the checkpoint's classifier, else embeddings
    labels: int = 0  # classes of it
    both_ways: bool = False  # every token reads all others
    token_rows: tuple[int, ...] = ()  # the classifier is made of these rows of the language model's head
    as_difference: bool = False  # of its two rows: the second minus the first
    keeps_head: bool = False  # results are columns of the vocabulary
    dense: tuple[HeadLayer, ...] = ()  # of sentence-transformers, after pooling
    term_pooling: str = ""  # max | sum: an embedding is one weight per term of the vocabulary (SPLADE)
    term_stem: str = ""  # the family whose head computes these


class PoolingModel(nn.Module):
    captures = False

    def __init__(
        self, trunk: Decoder | Encoder, head: Sequence[HeadLayer], kind: PoolingKind, storage: Storage,
        *, terms: str = "",  # name of the bias of the vocabulary's logits
    ) -> None:  # fmt: skip
        super().__init__()
        self.trunk, self.kind, self.storage = trunk, kind, storage
        self.arch = trunk.arch.core if isinstance(trunk, Encoder) else trunk.arch
        if kind.token_rows:
            head = (HeadLayer("", 1 if kind.as_difference else len(kind.token_rows), bias=False),)
        self.head = PoolingHead(head, self.arch.width, storage)
        self.dense = PoolingHead(kind.dense, self.head.outputs, storage)
        self.terms = (
            Head(terms, self.arch.vocab, self.arch.width, storage, bias=True, tied=trunk.embed) if terms else None
        )

    @property
    def both_ways(self) -> bool:
        return isinstance(self.trunk, Encoder)

    def forward(self, batch: Batch) -> Tensor:
        assert isinstance(self.trunk, Decoder)
        return self.trunk(batch)

    def read(self, texts: Texts) -> Tensor:
        """As forward, for a trunk that reads both ways."""
        assert isinstance(self.trunk, Encoder)
        return self.trunk(texts)

    def embed(self, vectors: Tensor) -> Tensor:
        """[N, width] -> [N, outputs] float32: through the dense layers that follow pooling."""
        if self.terms is not None:  # vectors are weights of terms
            return vectors
        return self.dense(self.head(vectors) if not self.kind.classifies else vectors)

    def term_weights(self, hidden: Tensor) -> Tensor:
        """[N, width] of one text -> [1, vocabulary] float32: log(1 + relu(logit)), the maximum or sum over tokens."""
        assert self.terms is not None
        parts = []
        for rows in hidden.split(_TERM_ROWS):
            logits = self.terms(self.head(rows).to(self.storage.dtype)).float()
            # the logarithm keeps the order, so that the maximum may come first
            parts.append(logits.amax(0) if self.kind.term_pooling == "max" else logits.relu().log1p().sum(0))
        together = torch.stack(parts)
        return (together.amax(0).relu().log1p() if self.kind.term_pooling == "max" else together.sum(0))[None]

    def classify(self, vectors: Tensor) -> Tensor:
        """[N, width] -> [N, labels] float32."""
        return self.head(vectors)

    def columns(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[N, len(token_ids)] float32: logits of these tokens alone, or of these classes."""
        if not self.kind.keeps_head:
            return self.head(hidden).index_select(1, token_ids)
        return hidden.float() @ self._rows(token_ids).t()

    def _rows(self, token_ids: Tensor) -> Tensor:
        assert isinstance(self.trunk, Decoder)
        return self.trunk.head.take(token_ids).float()

    # ---- as every model ----------------------------------------------------------------------------------------

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        raise ConfigError("a pooling model has no logits of next tokens", param="runner")

    narrow_logits = logits

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        return self.trunk.kv_specs(block_size, kv_dtype) if isinstance(self.trunk, Decoder) else []

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        if isinstance(self.trunk, Decoder):
            self.trunk.bind_kv(caches, groups)

    def table(self) -> WeightTable:
        table = self.trunk.table()
        table.extend(() if self.kind.token_rows else slots_of(self.head), ignore=_OTHER_HEADS)
        if self.terms is not None:
            table.extend(slots_of(self.terms))
        return table

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        taken = self.table().load_all(weights)
        self.finish_weights()
        return taken

    @torch.no_grad()
    def finish_weights(self) -> None:
        self.trunk.finish_weights()
        if self.terms is not None:
            self.terms.finish()
        if self.kind.token_rows:
            rows = self._rows(torch.tensor(self.kind.token_rows, device=self.storage.device))
            classifier = self.head.layers[0]
            assert isinstance(classifier, HeadDense)
            classifier.weight.copy_(rows[1:] - rows[:1] if self.kind.as_difference else rows)


def trunk_name(raw: Mapping[str, Any]) -> str:
    """The declared architecture of a trunk: LlamaForCausalLM for LlamaForSequenceClassification."""
    for name in raw.get("architectures") or ():
        if name in ENCODERS or name in ZOO:
            return str(name)
        for end in _ENDS:
            if not name.endswith(end):
                continue
            stem = name.removesuffix(end)
            for declared in (stem + head for head in _GENERATING):
                if declared in ZOO:
                    return declared
    names = ", ".join(map(repr, raw.get("architectures") or ())) or "none"
    encoders = sorted({name.removesuffix("Model") for name in ENCODERS.names() if name.endswith("Model")})
    raise ConfigError(
        f"no pooling model is declared for the architecture {names:.200}; declared are the encoders "
        f"({', '.join(encoders)}) and every decoder",
        param="architectures",
    )


def pooled_arch(raw: Mapping[str, Any], kind: PoolingKind) -> Arch | EncoderArch:
    """The architecture of a trunk."""
    name = trunk_name(raw)
    named: dict[str, Any] = {**raw, "architectures": [name]}
    if name in ENCODERS:
        encoder = encoder_arch(named)
        assert encoder is not None
        return encoder
    if kind.both_ways:  # a decoder's declaration knows no other mask than its own
        named.pop("use_bidirectional_attention", None)
    arch = read_arch(named)
    if not (kind.keeps_head or kind.token_rows):
        arch = replace(arch, tie=True, head_bias=False)
    if not kind.both_ways:
        return arch
    if any(layer.mixer != "attention" for layer in arch.layers):
        raise ConfigError("a model with recurrent states reads one way only (is_causal)", param="is_causal")
    names, ignore = (*arch.names, *COMMON_NAMES), (*arch.ignore, r"^lm_head\.")
    if raw.get("use_bidirectional_attention") and raw.get("model_type", "").startswith("gemma3"):
        arch = each(arch, lambda i, layer: {"window": layer.window // 2 + 1 if layer.window else 0})
    return EncoderArch(replace(arch, names=names, ignore=ignore, alibi=0.0))


def build_pooling(
    raw: Mapping[str, Any], arch: Arch | EncoderArch, kind: PoolingKind, storage: Storage, *, max_model_len: int
) -> PoolingModel:
    width = arch.core.width if isinstance(arch, EncoderArch) else arch.width
    name = str(next(iter(raw.get("architectures") or ("",))))
    needs_head, terms = kind.classifies or name == "HF_ColBERT", ""
    layers = check_layers(head_layers(raw, name, width, kind.labels)) if needs_head and not kind.token_rows else ()
    if kind.term_pooling:
        dense, terms = term_head(raw, kind.term_stem, width)
        layers = check_layers((dense,))
    outputs = layers[-1].outputs if layers and not kind.classifies else width
    for layer, inputs in zip(kind.dense, (outputs, *(one.outputs for one in kind.dense)), strict=False):
        if layer.inputs and layer.inputs != inputs:
            raise ConfigError(f"a dense layer of the model takes {layer.inputs} values, and gets {inputs}")
    trunk: Decoder | Encoder
    if isinstance(arch, EncoderArch):
        trunk = Encoder(arch, storage, max_model_len=max_model_len)
    else:
        trunk = Decoder(arch, storage, max_model_len=max_model_len)
    return PoolingModel(trunk, layers, kind, storage, terms=terms)
