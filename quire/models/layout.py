"""Layouts a checkpoint may store its matrices in, undone while loading: from an Arch to the table's `arrange`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from quire.layers.table import Arrange
from quire.models.arch import Arch

_MATRIX = re.compile(r"\.layers\.\d+\.(self_attn|mlp)\.\w+\.weight$")


def arrange_for(arch: Arch) -> Arrange:
    """A function (canonical name, tensor) -> the tensor as our parameters hold it."""

    def arrange(name: str, tensor: Tensor) -> Tensor:
        if arch.transposed and _MATRIX.search(name):
            tensor = tensor.t()
        if arch.qkv_layout and ".qkv_proj." in name:
            tensor = _per_head(tensor, arch) if arch.qkv_layout == "per_head" else _per_group(tensor, arch)
        if arch.expert_layout and ".experts." in name:
            tensor = _transposed_interleaved(name, tensor)
        return tensor

    return arrange


def _per_head(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q k v) of head 0, (q k v) of head 1, ... -> all q, all k, all v."""
    if tensor.shape[0] != 3 * arch.heads * arch.head_dim:
        return tensor  # the table will name the shapes
    split = tensor.unflatten(0, (arch.heads, 3, arch.head_dim))
    return torch.cat([split[:, i].flatten(0, 1) for i in range(3)])


def _per_group(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q.. k v) of kv head 0, (q.. k v) of kv head 1, ... -> all q, all k, all v."""
    per = arch.heads // arch.kv_heads
    if tensor.shape[0] != arch.kv_heads * (per + 2) * arch.head_dim:
        return tensor
    split = tensor.unflatten(0, (arch.kv_heads, per + 2, arch.head_dim))
    return torch.cat([split[:, :per].flatten(0, 2), split[:, per].flatten(0, 1), split[:, per + 1].flatten(0, 1)])


def _transposed_interleaved(name: str, tensor: Tensor) -> Tensor:
    """[E, in, out] -> [E, out, in]; columns gate, up, gate, up, ... -> gate rows, then up rows."""
    if tensor.ndim == 3:
        tensor = tensor.transpose(1, 2)
    if ".gate_up_proj" in name:
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
    return tensor
