"""OLMo 1 to 3 and OLMoE: norms without weights, norms after the sublayers, norms over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.moe import MoeKind
from quire.layers.norm import NormKind
from quire.models.arch import Arch, each
from quire.models.view import View, every, full_only, read


def olmo(c: View) -> Arch:
    return read(c, norm=NormKind("layer", eps=1e-5, weight=False), qkv_clip=c.get("clip_qkv", default=0.0))


def olmo2(c: View) -> Arch:
    arch = read(c, order="post", qk_norm="full")
    return replace(arch, norm=replace(arch.norm, wide=True))


def olmo3(c: View) -> Arch:
    arch = read(c, kinds=every(4, c.num_hidden_layers), ropes=full_only, order="post", qk_norm="full")
    return replace(arch, norm=replace(arch.norm, wide=True))


def olmoe(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_experts", "num_local_experts"), c.num_experts_per_tok, c.intermediate_size,
        renorm=c.norm_topk_prob, round_weights=True,
    )  # fmt: skip
    arch = read(c, qk_norm="full", qkv_clip=c.get("clip_qkv", default=0.0), moe=moe)
    return each(arch, lambda i, layer: {"moe": True})
