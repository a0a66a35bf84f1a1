"""Matrix layouts of checkpoints, converted while loading: from an Arch to the table's `arrange`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from quire.layers.ssm import DeltaKind, Mamba2Kind
from quire.layers.table import Arrange
from quire.models.arch import Arch

_MATRIX = re.compile(r"\.layers\.\d+\.(self_attn|mlp)\.\w+\.weight$")


def arrange_for(arch: Arch) -> Arrange:
    """A function (canonical name, tensor) -> the tensor in the layout of the parameters."""

    def arrange(name: str, tensor: Tensor) -> Tensor:
        if arch.transposed and _MATRIX.search(name):
            tensor = tensor.t()
        if arch.qkv_layout and ".qkv_proj." in name:
            tensor = _QKV[arch.qkv_layout](tensor, arch)
        if arch.up_first and ".mlp.gate_up_proj." in name:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        if arch.attn_gate and not arch.gate_name and ".self_attn.q_proj." in name:
            tensor = _gates_first(tensor, arch)
        if arch.state_layout and isinstance(arch.state, DeltaKind) and ".mixer.in_proj_" in name:
            tensor = _per_key_head(name, tensor, arch.state)
        if name.endswith("e_score_correction_bias"):
            tensor = tensor.flatten()  # some store one row of them
        if arch.fold:
            tensor = _folded(name, tensor, arch)
        if arch.moe is not None and arch.moe.identities and tensor.ndim == 3 and ".experts." in name:
            tensor = tensor[: arch.moe.experts]  # choices that are no experts have rows, too
        if arch.expert_layout and ".experts." in name:
            tensor = _transposed_experts(name, tensor, arch.expert_layout)
        return tensor

    return arrange


def _per_head(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q k v) of head 0, (q k v) of head 1, ... -> all q, all k, all v."""
    if tensor.shape[0] != 3 * arch.heads * arch.head_dim:
        return tensor  # the table will report the shapes
    split = tensor.unflatten(0, (arch.heads, 3, arch.head_dim))
    return torch.cat([split[:, i].flatten(0, 1) for i in range(3)])


def _per_group(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q.. k v) of kv head 0, (q.. k v) of kv head 1, ... -> all q, all k, all v."""
    per = arch.heads // arch.kv_heads
    if tensor.shape[0] != arch.kv_heads * (per + 2) * arch.head_dim:
        return tensor
    split = tensor.unflatten(0, (arch.kv_heads, per + 2, arch.head_dim))
    return torch.cat([split[:, :per].flatten(0, 2), split[:, per].flatten(0, 1), split[:, per + 1].flatten(0, 1)])


def _in_four(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q.. v.. k..) of the first quarter of the heads, of the second, ... -> all q, all k, all v."""
    if tensor.shape[0] != 3 * arch.heads * arch.head_dim or arch.heads % 4:
        return tensor
    split = tensor.unflatten(0, (4, 3, -1))
    return torch.cat([split[:, i].flatten(0, 1) for i in (0, 2, 1)])


_QKV = {"per_head": _per_head, "per_group": _per_group, "qvk_in_four": _in_four}


def _gates_first(tensor: Tensor, arch: Arch) -> Tensor:
    """Rows (q, gate) of head 0, (q, gate) of head 1, ... -> all gates, all q."""
    if tensor.shape[0] != 2 * arch.heads * arch.head_dim:
        return tensor
    split = tensor.unflatten(0, (arch.heads, 2, arch.head_dim))
    return torch.cat((split[:, 1].flatten(0, 1), split[:, 0].flatten(0, 1)))


def _folded(name: str, tensor: Tensor, arch: Arch) -> Tensor:
    """Factors of a matmul's input or output, folded into the rows of its weight."""
    for pattern, factor in arch.fold:
        if re.search(pattern, name):
            tensor = tensor * factor
    kind = arch.state
    if isinstance(kind, Mamba2Kind) and kind.scales and ".mixer.in_proj." in name:
        inner, shared = kind.heads * kind.head_dim, kind.groups * kind.state
        sizes = torch.tensor((inner, inner, shared, shared, kind.heads))
        scales = torch.tensor(kind.scales, dtype=torch.float32).repeat_interleave(sizes)
        if len(scales) == len(tensor):
            tensor = (tensor * scales.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))).to(tensor.dtype)
    return tensor


def _per_key_head(name: str, tensor: Tensor, kind: DeltaKind) -> Tensor:
    """Rows (q, k, v.., z..) or (b.., a..) of key head 0, of key head 1, ... -> all of each, one after another."""
    per = kind.value_heads // kind.key_heads
    sizes = [per, per]
    if ".in_proj_qkvz." in name:
        sizes = [kind.key_dim, kind.key_dim, per * kind.value_dim, per * kind.value_dim]
    elif ".in_proj_ba." not in name:
        return tensor
    if tensor.shape[0] != kind.key_heads * sum(sizes):
        return tensor
    parts = tensor.unflatten(0, (kind.key_heads, -1)).split(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _transposed_experts(name: str, tensor: Tensor, layout: str) -> Tensor:
    """[E, in, out] -> [E, out, in]; interleaved: columns gate, up, gate, up, ... -> gate rows, then up rows."""
    if tensor.ndim == 3:
        tensor = tensor.transpose(1, 2)
    if ".gate_up_proj" in name and layout == "transposed_interleaved":
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
    return tensor
