"""DeepSeek V2 and V3 (latent attention, experts selected by groups), models with the same experts, and LongCat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.moe import MoeKind
from quire.models.arch import Arch, Mla, each, with_rope
from quire.models.view import FULL, SLIDING, View, read
from quire.ops.rope import yarn_mscale

_NAMES = ((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),)


def _mixture(c: View, arch: Arch, **over: Any) -> Arch:
    """The first layers dense, then routed and shared experts; layers beyond the last are draft heads and ignored."""
    experts, step = c.get("n_routed_experts", "num_experts"), c.get("moe_layer_freq", default=1)
    if not experts or not c.get("num_experts_per_tok"):
        return arch
    moe = MoeKind(
        experts, c.num_experts_per_tok, c.moe_intermediate_size, router_wide=True, **over,
        scale=c.get("routed_scaling_factor", "router_scaling_factor", default=1.0),
        shared_ffn=c.moe_intermediate_size * (c.get("n_shared_experts", "num_shared_experts") or 0),
    )  # fmt: skip
    drafts = c.get("num_nextn_predict_layers", default=0)
    ignore = tuple(rf"^model\.layers\.{len(arch.layers) + i}\." for i in range(drafts))
    arch = replace(arch, moe=moe, names=(*arch.names, *_NAMES), ignore=(*arch.ignore, *ignore))
    if kinds := c.get("mlp_layer_types"):
        return each(arch, lambda i, layer: {"moe": kinds[i] == "sparse"})
    dense = c.get("first_k_dense_replace", default=0)
    return each(arch, lambda i, layer: {"moe": i >= dense and i % step == 0})


def grouped_experts(c: View, arch: Arch, renorm: bool | None = None) -> Arch:
    """Sigmoid scores, a stored selection bias, groups ranked by their best two."""
    renorm = c.norm_topk_prob if renorm is None else renorm
    return _mixture(
        c, arch, score="sigmoid", select_bias=True, groups=c.get("n_group", default=1),
        top_groups=c.get("topk_group", default=1), group_score="top2sum", renorm=renorm,
    )  # fmt: skip


def latent(c: View, *, pairs: bool, wide: bool, value: int = 0) -> Arch:
    """`value`: the size of values if the config lacks it."""
    value = value or c.v_head_dim
    mla = Mla(c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, value, c.maybe("q_lora_rank") or 0)
    arch = read(c, mla=mla, head_dim=mla.rope)
    scale, rope = (mla.nope + mla.rope) ** -0.5, arch.layers[0].rope
    if rope is not None and rope.scaling and rope.scaling.get("mscale_all_dim"):
        scale *= yarn_mscale(rope.scaling["factor"], rope.scaling["mscale_all_dim"]) ** 2
    return with_rope(replace(arch, attn_scale=scale), pairs=pairs, wide=wide)


def deepseek_v2(c: View) -> Arch:
    """transformers never renormalizes here, whatever norm_topk_prob is (it is false in every release)."""
    return _greedy_experts(c, latent(c, pairs=True, wide=True))


def deepseek_ocr(c: View) -> Arch:
    """The experts of V2 with plain attention."""
    return _greedy_experts(c, read(c))


def _greedy_experts(c: View, arch: Arch) -> Arch:
    groups: dict[str, Any] = {}
    method = c.get("topk_method", default="greedy")
    if method == "group_limited_greedy":
        groups = dict(groups=c.get("n_group", default=1), top_groups=c.get("topk_group", default=1))
    elif method != "greedy":
        c.refuse("topk_method", "known are greedy and group_limited_greedy")
    return _mixture(c, arch, renorm=False, **groups)


def deepseek_v3(c: View) -> Arch:
    return grouped_experts(c, latent(c, pairs=c.rope_interleave, wide=False))


_LONGCAT = (
    (r"\.mlp\.router\.classifier\.", ".mlp.gate."),
    (r"\.mlp\.router\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
)


def longcat_flash(c: View) -> Arch:
    """Two attentions and two mlps a layer, beside which experts run; some choices of the router are no experts."""
    if c.get("zero_expert_type", default="identity") != "identity":
        c.refuse("zero_expert_type", "known is identity")
    arch, experts, none = latent(c, pairs=True, wide=False), c.n_routed_experts, c.get("zero_expert_num", default=0)
    assert arch.mla is not None
    scales = [
        (c.hidden_size / rank) ** 0.5 if rank and c.get(key, default=True) else 1.0
        for key, rank in (("mla_scale_q_lora", arch.mla.q_rank), ("mla_scale_kv_lora", arch.mla.kv_rank))
    ]
    moe = MoeKind(
        experts, c.moe_topk, c.expert_ffn_hidden_size, renorm=False, scale=c.routed_scaling_factor, select_bias=True,
        router_wide=True, identities=none,
    )  # fmt: skip
    ignore: tuple[str, ...] = (r"^model\.mtp\.", r"\.mlp\.router\.classifier\.bias$")
    if none:  # transformers writes matrices for them
        ignore += (rf"\.mlp\.experts\.({'|'.join(map(str, range(experts, experts + none)))})\.",)
    arch = replace(
        arch, order="shortcut", moe=moe, mla=replace(arch.mla, latent_scale=scales[1]), names=_LONGCAT, ignore=ignore,
        attn_scale=arch.attn_scale * scales[0], layers=arch.layers[: c.num_layers],
    )  # fmt: skip
    return each(arch, lambda i, layer: {"moe": True})


def dots1(c: View) -> Arch:
    slides = c.maybe("sliding_window")
    kinds = [SLIDING if slides and i >= c.max_window_layers else FULL for i in range(c.num_hidden_layers)]
    return grouped_experts(c, read(c, kinds=kinds, qk_norm="head"))
