"""Heads of pooling models: what turns a vector of the trunk into an embedding, classes or a reward.

A head is a few small dense layers in float32, declared as data by `head_layers` from the name of an architecture.
In: vectors [N, width]. Out: [N, outputs]. Must not know: which positions the vectors come from, activations of results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.ops.act import known, plain_on
from quire.quant.scheme import Slot, Storage
from quire.schema.errors import ConfigError


@dataclass(frozen=True)
class HeadLayer:
    """One dense layer, and what follows it. `name` is that of the checkpoint."""

    name: str
    outputs: int
    bias: bool = True
    act: str = ""
    norm: str = ""  # name of a layer norm after the activation
    norm_bias: bool = False
    eps: float = 1e-5
    inputs: int = 0  # 0: whatever comes


class HeadDense(nn.Module):
    def __init__(self, layer: HeadLayer, inputs: int, storage: Storage) -> None:
        super().__init__()
        device = storage.device
        self.layer, self.inputs = layer, inputs
        self.weight = _parameter((layer.outputs, inputs), device)
        self.bias = _parameter((layer.outputs,), device) if layer.bias else None
        self.norm_weight = _parameter((layer.outputs,), device) if layer.norm else None
        self.norm_bias = _parameter((layer.outputs,), device) if layer.norm and layer.norm_bias else None
        self._act: Callable[[Tensor], Tensor] | None = plain_on(layer.act, storage.kernels) if layer.act else None

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        if self._act is not None:
            y = self._act(y)
        if self.norm_weight is not None:
            y = nn.functional.layer_norm(y, (self.layer.outputs,), self.norm_weight, self.norm_bias, self.layer.eps)
        return y

    def slots(self) -> Iterator[Slot]:
        name, norm = self.layer.name, self.layer.norm
        named = ((f"{name}.weight", self.weight), (f"{name}.bias", self.bias),
                 (f"{norm}.weight", self.norm_weight), (f"{norm}.bias", self.norm_bias))  # fmt: skip
        for name, parameter in named:
            if parameter is not None:
                yield Slot(name, parameter.data)


class PoolingHead(nn.Module):
    """Dense layers one after another; none: vectors as they are."""

    def __init__(self, layers: Sequence[HeadLayer], width: int, storage: Storage) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in layers:
            self.layers.append(HeadDense(layer, width, storage))
            width = layer.outputs
        self.outputs = width

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        for layer in self.layers:
            x = layer(x)
        return x


def _parameter(shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device), requires_grad=False)


def head_layers(raw: Mapping[str, Any], name: str, width: int, labels: int) -> tuple[HeadLayer, ...]:
    """The classifier of an architecture. `labels`: how many classes it tells apart."""
    if name.endswith("RewardModel"):
        return HeadLayer("score.0", width, act="relu"), HeadLayer("score.2", labels)
    if name == "HF_ColBERT":
        return (HeadLayer("linear", _size(raw, "dim", 128), bias=False),)
    stem, _, end = name.partition("For")
    per_token = end == "TokenClassification"
    if stem in ("Bert", "Ernie", "NomicBert", "Gte", "New", "JinaBert"):
        first = () if per_token else (HeadLayer("pooler.dense", width, act="tanh"),)
        return (*first, HeadLayer("classifier", labels))
    if stem in ("Roberta", "XLMRoberta", "Camembert", "JinaEmbeddingsV3", "MPNet", "Electra"):
        if per_token:
            return (HeadLayer("classifier", labels),)
        act = "gelu" if stem == "Electra" else "tanh"
        return HeadLayer("classifier.dense", width, act=act), HeadLayer("classifier.out_proj", labels)
    if stem == "DistilBert":
        first = () if per_token else (HeadLayer("pre_classifier", width, act="relu"),)
        return (*first, HeadLayer("classifier", labels))
    if stem == "ModernBert":
        act, eps = raw.get("classifier_activation", "gelu"), raw.get("norm_eps", 1e-5)
        dense = HeadLayer(
            "head.dense", width, bias=bool(raw.get("classifier_bias", False)), act=act, norm="head.norm",
            norm_bias=bool(raw.get("norm_bias", False)), eps=eps,
        )  # fmt: skip
        return dense, HeadLayer("classifier", labels)
    if stem == "EuroBert":
        if per_token:
            return (HeadLayer("classifier", labels),)
        return HeadLayer("dense", width, act="gelu"), HeadLayer("classifier", labels)
    return (HeadLayer("score", labels, bias=per_token),)


def term_head(raw: Mapping[str, Any], stem: str, width: int) -> tuple[HeadLayer, str]:
    """The head of a masked language model: its dense layer, and the name under which the bias of its logits lies."""
    eps = raw.get("layer_norm_eps", 1e-12)
    if stem == "DistilBert":
        dense = HeadLayer("vocab_transform", width, act=raw.get("activation", "gelu"), norm="vocab_layer_norm",
                          norm_bias=True, eps=1e-12)  # fmt: skip
        return dense, "vocab_projector"
    if stem == "Bert":
        name = "cls.predictions.transform"
        dense = HeadLayer(f"{name}.dense", width, act=raw.get("hidden_act", "gelu"), norm=f"{name}.LayerNorm",
                          norm_bias=True, eps=eps)  # fmt: skip
        return dense, "cls.predictions"
    dense = HeadLayer("lm_head.dense", width, act="gelu", norm="lm_head.layer_norm", norm_bias=True, eps=eps)
    return dense, "lm_head"


def check_layers(layers: Sequence[HeadLayer]) -> tuple[HeadLayer, ...]:
    """ConfigError for an activation that is not known, or a size that is none."""
    for layer in layers:
        if layer.act and (not isinstance(layer.act, str) or not known(layer.act)):
            raise ConfigError(f"unknown activation {layer.act!r:.100} of a head in config.json", param="hidden_act")
    return tuple(layers)


def _size(raw: Mapping[str, Any], key: str, usual: int) -> int:
    value = raw.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise ConfigError(f"config.json gives {key} = {value!r:.100}; expected 1 to {1 << 20}", param=key)
    return value
