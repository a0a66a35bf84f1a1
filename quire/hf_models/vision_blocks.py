"""Blocks of transformers' vision encoders computed with Quire's kernels, out of the weights that they were loaded with.

In: the module of a tower on a GPU, in 16 bits. Out: the same module, whose blocks and patch projections of known
classes are replaced: a norm, a rotation and a gated activation are one kernel each, gate and up one matrix, and the
widths of matrices are filled up with zeros to what tensor cores read well (3420 of Qwen2.5-VL is no multiple of 8).
What comes out is what the class computes, but for rounding. Must not know: checkpoints, requests.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.ops.act import PLAIN, gated_of
from quire.ops.attention import packed_attention
from quire.ops.norm import add_rms_norm, rms_norm
from quire.ops.op import Kernels
from quire.ops.rope import turn_heads_

_ALIGN = 64  # numbers
_BLOCKS = ("Qwen2_5_VLVisionBlock",)
_PATCHES = ("Qwen2_5_VisionPatchEmbed",)


class VisionBlock(nn.Module):
    """Of the classes in _BLOCKS."""

    def __init__(self, block: Any, act: str, kernels: Kernels) -> None:
        super().__init__()
        attn, mlp = block.attn, block.mlp
        self.norm1, self.norm2, self.qkv, self.proj = block.norm1, block.norm2, attn.qkv, attn.proj
        self.heads, self.scale = attn.num_heads, float(attn.scaling)
        self.gate_up = _stacked(mlp.gate_proj, mlp.up_proj)
        self.down = _widened(mlp.down_proj)
        self._gated = kernels.of(gated_of(PLAIN[act].name))
        self._norm, self._add_norm = kernels.of(rms_norm), kernels.of(add_rms_norm)
        self._turn, self._attend = kernels.of(turn_heads_), kernels.of(packed_attention)

    def forward(
        self,
        hidden_states: Tensor,  # [T, width]
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        tokens, heads = len(hidden_states), self.heads
        x = self._norm(hidden_states, self.norm1.weight, self.norm1.variance_epsilon)
        qkv = self.qkv(x).view(tokens, 3 * heads, -1)
        self._turn(qkv[:, : 2 * heads], *position_embeddings)
        q, k, v = qkv.split(heads, 1)
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if max_seqlen is None else max_seqlen
        delta = self.proj(self._attend(q, k, v, cu_seqlens, longest, self.scale).reshape(tokens, -1))
        x, total = self._add_norm(hidden_states, delta, self.norm2.weight, self.norm2.variance_epsilon)
        return total + self.down(self._gated(self.gate_up(x)))


class PatchProjection(nn.Module):
    """A convolution whose steps are as long as its kernel, over patches that lie flat: a matrix."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.data.flatten(1), requires_grad=False)
        self.bias = conv.bias

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _stacked(gate: nn.Linear, up: nn.Linear) -> nn.Linear:
    """[gate | zeros | up | zeros]."""
    more = -gate.out_features % _ALIGN
    weight = torch.cat([F.pad(part.weight.data, (0, 0, 0, more)) for part in (gate, up)])
    bias = None if gate.bias is None else torch.cat([F.pad(part.bias.data, (0, more)) for part in (gate, up)])
    return _linear(weight, bias)


def _widened(down: nn.Linear) -> nn.Linear:
    return _linear(F.pad(down.weight.data, (0, -down.in_features % _ALIGN)), None if down.bias is None else down.bias)


def fuse_blocks(module: nn.Module, kernels: Kernels) -> None:
    """Replace what can be, and run one of each once, so that the first item does not wait for a compiler."""
    first = None
    for owner in list(module.modules()):
        for name, part in list(owner._modules.items()):
            kind = type(part).__name__
            if part is not None and kind in _BLOCKS and (act := _act_of(part)) in PLAIN:
                owner._modules[name] = made = VisionBlock(part, act, kernels)
                first = first or made
            elif kind in _PATCHES and isinstance(conv := part._modules.get("proj"), nn.Conv3d):  # type: ignore[union-attr]
                owner._modules[name] = PatchProjection(conv)
    if first is not None:
        _run_once(first)


def _act_of(block: Any) -> str:
    return str(block.attn.config.hidden_act)


@torch.inference_mode()
def _run_once(block: VisionBlock) -> None:
    weight = block.qkv.weight
    size = weight.shape[0] // (3 * block.heads)
    for tokens in (64, 2048):
        x = torch.zeros((tokens, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        turn = torch.zeros((tokens, size), device=weight.device)
        block(x, torch.tensor([0, tokens], dtype=torch.int32, device=weight.device), (turn, turn), tokens)
