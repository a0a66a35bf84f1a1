"""Families with experts and the routing of an older family; norms, windows and names differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.base.log import logger, once
from quire.layers.moe import MoeKind
from quire.models.arch import Arch, Layer, each, with_rope, with_window
from quire.models.view import FULL, SLIDING, View, every, read
from quire.models.zoo.cohere import cohere_block
from quire.models.zoo.deepseek import grouped_experts, latent
from quire.models.zoo.dense import ernie4_5, granite_swa, hunyuan
from quire.models.zoo.granite import granite
from quire.models.zoo.olmo import olmoe

log = logger(__name__)

W123 = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
)
SHARED = ((r"\.mlp\.shared_(experts|mlp)\.", ".mlp.shared_expert."),)
CHOICE = ((r"\.(mlp|moe)\.(router\.)?(e_score_correction_bias|expert_bias)$", ".mlp.gate.e_score_correction_bias"),)
SANDWICH = (
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.(post_self_attn_layernorm|post_attn_norm)\.", ".post_attention_layernorm."),
    (r"\.(post_mlp_layernorm|post_ffn_norm)\.", ".post_feedforward_layernorm."),
)


def _all(arch: Arch) -> Arch:
    return each(arch, lambda i, layer: {"moe": True})


def _turning(arch: Arch) -> Arch:
    """Only layers with a window have rotary embeddings."""
    return each(arch, lambda i, layer: {} if layer.window else {"rope": None})


def ernie4_5_moe(c: View) -> Arch:
    first, last, step = c.moe_layer_start_index, c.moe_layer_end_index, c.moe_layer_interval
    ffn = c.moe_intermediate_size
    moe = MoeKind(
        c.get("num_experts", "moe_num_experts"), c.get("num_experts_per_tok", "moe_k"), ffn, select_bias=True,
        router_wide=True, round_weights=True, shared_ffn=ffn * c.moe_num_shared_experts, shared_bias=c.use_bias,
    )  # fmt: skip
    names = (*SHARED, (r"\.mlp\.(gate\.)?moe_statics\.e_score", ".mlp.gate.e_score"))
    arch = ernie4_5(c, moe=moe, names=names, head_bias=c.use_bias, ignore=(r"^model\.mtp_",))
    last = len(arch.layers) - 1 if last in (-1, None) else last
    return each(arch, lambda i, layer: {"moe": first <= i <= last and (i + 1) % step == 0})


def hunyuan_moe(c: View) -> Arch:
    def one(value: Any) -> Any:
        if isinstance(value, list) and len(set(value)) > 1:
            c.refuse("num_experts", "its layers have different numbers of experts")
        return value[0] if isinstance(value, list) else value

    moe = MoeKind(
        one(c.num_experts), one(c.moe_topk), c.intermediate_size, shared_ffn=c.intermediate_size, router_wide=True
    )
    return _all(hunyuan(c, moe=moe, names=(*SHARED, (r"\.mlp\.gate\.wg\.", ".mlp.gate."))))


def hy_v3(c: View) -> Arch:
    names = (*CHOICE, (r"\.mlp\.router\.gate\.", ".mlp.gate."), *SHARED)
    return grouped_experts(c, read(c, qk_norm="head", names=names), renorm=True)


def exaone_moe(c: View) -> Arch:
    pattern, count = c.get("sliding_window_pattern", default=4), c.num_hidden_layers
    if isinstance(pattern, str):
        kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
    else:
        kinds = every(pattern, count)
    arch = read(c, kinds=kinds, qk_norm="head", qkv_bias=False, o_bias=False, names=CHOICE, ignore=(r"^mtp\.",))
    return grouped_experts(c, _turning(arch))


def flex_olmo(c: View) -> Arch:
    arch = olmoe(c)
    return replace(arch, order="post", qkv_clip=0.0, norm=replace(arch.norm, wide=True))


def kolibri1(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_experts", "num_local_experts"), c.num_experts_per_tok, c.moe_intermediate_size, score="topk_sigmoid",
        select_bias=True,
        renorm=c.norm_topk_prob, router_wide=True, shared_ffn=c.shared_expert_intermediate_size,
    )  # fmt: skip
    arch = read(
        c, kinds=every(5, c.num_hidden_layers), order="sandwich", qk_norm="head", qkv_bias=False, o_bias=False, moe=moe,
        names=(*SANDWICH, *SHARED, *CHOICE), ffn=c.moe_intermediate_size,
    )  # fmt: skip
    return _all(_turning(arch))


def mellum(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_local_experts", "num_experts"), c.num_experts_per_tok, c.moe_intermediate_size,
        renorm=c.norm_topk_prob, round_weights=True,
    )  # fmt: skip
    arch = read(c, qk_norm="head", moe=moe, ignore=(r"^mtp\.",))
    kinds = c.get("mlp_layer_types", default=["sparse"] * len(arch.layers))
    return each(arch, lambda i, layer: {"moe": kinds[i] == "sparse"})


def minimax_m2(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_local_experts", "num_experts"), c.num_experts_per_tok, c.intermediate_size, score="sigmoid",
        select_bias=True,
    )  # fmt: skip
    arch = _all(read(c, qk_norm="full", qkv_bias=False, o_bias=False, moe=moe, names=(*W123, *CHOICE)))
    return with_rope(arch, dim=c.rotary_dim) if c.get("rotary_dim") else arch


def solar_open(c: View) -> Arch:
    arch = grouped_experts(c, read(c, o_bias=False, ffn=c.moe_intermediate_size))
    return _all(arch)


def glm4_moe_lite(c: View) -> Arch:
    return grouped_experts(c, latent(c, pairs=c.rope_interleave, wide=False))


def axk1(c: View) -> Arch:
    """DeepSeek V3 with a norm after the experts."""
    arch = glm4_moe_lite(c)
    arch = replace(arch, names=(*arch.names, (r"(?:\.mlp)?\.post_mlp_layernorm\.", ".post_feedforward_layernorm.")))
    return each(arch, lambda i, layer: {"order": "pre_post"} if layer.moe else {})


def indexed(c: View) -> Arch:
    """DeepSeek V3.2 and GLM 5: if the context is longer than index_topk, theirs is sparse, ours dense."""
    once(
        log,
        20,
        "attention is dense: the indexer, which selects %s tokens of longer contexts, is not used",
        c.index_topk,
    )
    arch = grouped_experts(c, latent(c, pairs=True, wide=False))
    return replace(arch, ignore=(*arch.ignore, r"\.self_attn\.indexer\."))


indexed_glm = indexed


def afmoe(c: View) -> Arch:
    ffn = c.moe_intermediate_size
    moe = MoeKind(
        c.num_experts, c.num_experts_per_tok, ffn, score="sigmoid", select_bias=True, scale=c.route_scale,
        shared_ffn=ffn * c.num_shared_experts,
    )  # fmt: skip
    names = (
        (r"\.pre_mlp_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        (r"\.mlp\.router\.gate\.", ".mlp.gate."), *CHOICE, *SHARED,
    )  # fmt: skip
    arch = read(
        c, kinds=every(c.global_attn_every_n_layers, c.num_hidden_layers), order="sandwich", qk_norm="head",
        attn_gate=True, gate_name="gate_proj", moe=moe, names=names,
        embed_scale=c.hidden_size**0.5 if c.mup_enabled else 1.0,
    )  # fmt: skip
    arch = _turning(replace(arch, norm=replace(arch.norm, wide=True)))
    return each(arch, lambda i, layer: {"moe": i >= c.num_dense_layers})


def flint(c: View) -> Arch:
    count = c.num_hidden_layers
    kinds = [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]
    moe = MoeKind(
        c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, score="sigmoid", renorm=c.norm_topk_prob,
        router_wide=True, shared_ffn=c.shared_expert_intermediate_size,
    )  # fmt: skip
    names = ((r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),)
    arch = read(c, kinds=kinds, qk_norm="head", sinks=True, moe=moe, names=names)
    arch = _turning(replace(arch, norm=replace(arch.norm, wide=True)))
    dense, step = c.get("mlp_only_layers", default=[0, 1]), c.decoder_sparse_step
    return each(arch, lambda i, layer: {"moe": i not in dense and (i + 1) % step == 0})


def phimoe(c: View) -> Arch:
    moe = MoeKind(
        c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, score="mixer", scale=2 * c.router_jitter_noise
    )
    names = (*W123, (r"\.mlp\.router\.", ".mlp.gate."))
    arch = read(c, moe=moe, names=names, head_bias=c.lm_head_bias)
    arch = replace(arch, norm=replace(arch.norm, kind="layer", bias=True))
    return _all(with_window(arch, c.maybe("sliding_window")))


_GRANITE = (
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.router\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
)


def granite_moe_shared(c: View, base: Any = granite) -> Arch:
    moe = MoeKind(
        c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, score="topk_softmax", round_weights=True,
        shared_ffn=c.shared_intermediate_size,
    )  # fmt: skip
    return _all(base(c, moe=moe, names=_GRANITE))


def granite_moe_swa(c: View) -> Arch:
    return granite_moe_shared(c, granite_swa)


def cohere2_moe(c: View) -> Arch:
    """The first layers may be dense; layers without a window have no rotary embeddings, unless they are dense."""
    first, width = c.get("first_k_dense_replace", default=0), c.intermediate_size
    kinds = every(c.prefix_dense_sliding_window_pattern, first) + every(
        c.sliding_window_pattern, c.num_hidden_layers - first
    )
    moe = MoeKind(
        c.num_experts, c.num_experts_per_tok, width, renorm=c.norm_topk_prob, round_weights=True,
        score="topk_sigmoid" if c.expert_selection_fn == "sigmoid" else "topk_softmax",
        shared_ffn=width * c.num_shared_experts,
    )  # fmt: skip
    half = c.num_shared_experts > 0 and c.shared_expert_combination_strategy == "average"
    arch = cohere_block(
        c, kinds=kinds, moe=moe, names=SHARED, ffn=c.maybe("prefix_dense_intermediate_size") or width,
        fold=((r"\.mlp\.(shared_)?experts?\..*down_proj", 0.5),) if half else (),
    )  # fmt: skip
    if c.maybe("rms_norm_eps") is not None:
        arch = replace(arch, norm=replace(arch.norm, kind="rms"))
    dense = c.get("mlp_layer_types", default=["dense"] * first + ["sparse"] * (len(arch.layers) - first))
    uses_rope = c.prefix_dense_sliding_window_pattern == 1

    def change(i: int, layer: Layer) -> dict[str, Any]:
        rotated = layer.window or (dense[i] == "dense" and uses_rope)
        return {"moe": dense[i] != "dense"} | ({} if rotated else {"rope": None})

    return each(arch, change)


def llama4(c: View) -> Arch:
    count, step = c.num_hidden_layers, c.interleave_moe_layer_step
    moe = MoeKind(
        c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, score="topk_sigmoid", renorm=False,
        weigh_input=True, round_weights=True, shared_ffn=c.intermediate_size,
    )  # fmt: skip
    grow = (float(c.attn_scale), int(c.floor_scale), 1) if c.attn_temperature_tuning else (0.0, 1, 0)
    arch = read(
        c, ffn=c.intermediate_size_mlp, moe=moe, qk_norm="head" if c.use_qk_norm else "", qk_norm_late=True,
        qk_norm_weight=False, grow=grow, expert_layout="transposed", mlp_bias=False,
        names=((r"^language_model\.", ""), (r"\.feed_forward\.", ".mlp."), (r"\.mlp\.router\.", ".mlp.gate.")),
        ignore=(r"^(vision_model|multi_modal_projector)\.",),
    )  # fmt: skip
    uses_rope = c.get("no_rope_layers") or [int((i + 1) % c.no_rope_layer_interval != 0) for i in range(count)]
    sparse = c.get("moe_layers", default=range(step - 1, count, step))
    arch = with_rope(arch, pairs=True, wide=True)
    near = {"grow": False, "chunk": c.maybe("attention_chunk_size") or 0}
    return each(
        arch, lambda i, layer: {"moe": i in sparse, **(near if uses_rope[i] else {"qk_norm": False, "rope": None})}
    )


def aria_text(c: View) -> Arch:
    moe = MoeKind(
        c.moe_num_experts, c.moe_topk, c.intermediate_size, score="topk_softmax", round_weights=True,
        shared_ffn=c.intermediate_size * c.moe_num_shared_experts, shared_bias=c.mlp_bias,
    )  # fmt: skip
    names = (
        *SHARED, (r"\.mlp\.router\.", ".mlp.gate."), (r"\.experts\.fc1\.weight$", ".experts.gate_up_proj"),
        (r"\.experts\.fc2\.weight$", ".experts.down_proj"),
    )  # fmt: skip
    return _all(read(c, moe=moe, names=names, expert_layout="transposed"))
