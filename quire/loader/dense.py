"""What a pooling model is built for, from a resolved configuration, and the weights of its dense layers.

sentence-transformers keeps dense layers that follow pooling in folders of their own beside the model's weights. In: a
ModelConfig. Out: a PoolingKind; filled layers. Must not know: architectures.
"""

from __future__ import annotations

import torch

from quire.checkpoint.sentence import SentenceFiles
from quire.checkpoint.weight_files import find_weights
from quire.config.model import ModelConfig
from quire.config.pooling import (
    classifier_method,
    num_labels,
    reads_both_ways,
    returns_vocabulary,
    term_pooling,
    term_stem,
)
from quire.loader.by_layer import check_complete
from quire.loader.files import read_weights
from quire.models.heads import HeadDense, HeadLayer, PoolingHead
from quire.models.pooled import PoolingKind
from quire.quant.scheme import Slot
from quire.schema.errors import CheckpointError


def pooling_kind(about: ModelConfig) -> PoolingKind:
    classifies = about.convert in ("classify", "reward")
    rows = about.classifier_token_ids
    keeps_head = returns_vocabulary(about)
    dense = () if about.sentence is None else about.sentence.dense
    return PoolingKind(
        classifies=classifies and not keeps_head,
        labels=num_labels(about) if classifies else 0,
        both_ways=reads_both_ways(about),
        token_rows=rows,
        as_difference=bool(rows) and classifier_method(about) == "from_2_way_softmax",
        keeps_head=keeps_head,
        term_pooling=term_pooling(about),
        term_stem=term_stem(about) if term_pooling(about) else "",
        dense=tuple(
            HeadLayer(f"dense.{i}", one.outputs, bias=one.bias, act=one.activation, inputs=one.inputs)
            for i, one in enumerate(dense)
        ),
    )


def fill_dense(head: PoolingHead, files: SentenceFiles) -> None:
    """Read the weights of every dense layer from its folder."""
    for layer, file in zip(head.layers, files.dense, strict=True):
        assert isinstance(layer, HeadDense)
        slots = {_leaf(slot): slot for slot in layer.slots()}
        pieces = read_weights(
            find_weights(file.folder, "auto", ()), dtype=torch.float32, device=next(layer.parameters()).device,
            keeps=lambda type_id: False,
        )  # fmt: skip
        for piece in pieces:
            for name, tensor in piece.read():
                slot = slots.pop(name.removeprefix("linear."), None)
                if slot is None or not isinstance(slot.target, torch.Tensor) or not isinstance(tensor, torch.Tensor):
                    raise CheckpointError(f"{file.folder}: the dense layer has no place for tensor {name!r}")
                if slot.target.shape != tensor.shape:
                    raise CheckpointError(
                        f"{file.folder}: tensor {name!r} has shape {list(tensor.shape)}, but its config.json asks for "
                        f"{list(slot.target.shape)}"
                    )
                slot.target.copy_(tensor)
        check_complete(file.folder, [f"linear.{leaf}" for leaf in slots], [])


def _leaf(slot: Slot) -> str:
    return slot.name.rpartition(".")[2]
