"""Models with recurrent states: in all layers (Mamba), or in most, with a few layers of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.layers.kda import KdaKind
from quire.layers.lightning import LightningKind
from quire.layers.moe import MoeKind
from quire.layers.norm import NormKind
from quire.layers.shared import SharedKind
from quire.layers.ssm import NO_LIMIT, DeltaKind, Mamba2Kind, MambaKind, ShortConvKind
from quire.models.arch import Arch, Layer, Mla, each
from quire.models.view import FULL, View, read, rope_kind
from quire.models.zoo.granite import granite
from quire.models.zoo.llama import mixtral

STATE = "linear_attention"
_ATTENDS = (FULL, "attention")


def _mixers(arch: Arch, kinds: Sequence[str]) -> Arch:
    """Layers of type full_attention have attention, all others states."""
    return each(arch, lambda i, layer: {"mixer": "attention" if kinds[i] in _ATTENDS else "state"})


def _no_rope(arch: Arch) -> Arch:
    return each(arch, lambda i, layer: {"rope": None})


def _limit(c: View) -> tuple[float, float]:
    """Step sizes are clamped to it. Infinity is written as {"__float__": "Infinity"}."""
    low, high = (
        float(end["__float__"] if isinstance(end, dict) else end) for end in c.get("time_step_limit", default=NO_LIMIT)
    )
    return low, high


def _only_states(c: View, kind: Mamba2Kind | MambaKind) -> Arch:
    """Only mixers, each after a norm. Such a model has no maximum length."""
    names = (
        (r"^(backbone|model)\.embeddings?\.", "model.embed_tokens."),
        (r"^(backbone|model)\.norm_f\.", "model.norm."),
        (r"^backbone\.", "model."),
        (r"\.layers\.(\d+)\.norm\.", r".layers.\1.input_layernorm."),
    )
    return Arch(
        vocab=c.vocab_size, width=c.hidden_size, heads=1, kv_heads=1, head_dim=c.hidden_size, ffn=0,
        layers=(Layer(mixer="state"),) * c.num_hidden_layers, max_positions=1 << 20, order="single",
        norm=NormKind(eps=c.layer_norm_epsilon), state=kind, tie=c.tie_word_embeddings, names=names,
    )  # fmt: skip


# --- gated delta nets ------------------------------------------------------------------------------------------------


def _gated_delta(c: View, **over: Any) -> Arch:
    count, every = c.num_hidden_layers, c.get("full_attention_interval", default=4)
    kinds = c.get("layer_types", default=[STATE if (i + 1) % every else FULL for i in range(count)])
    delta = DeltaKind(
        c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim,
        conv=c.linear_conv_kernel_dim, act=c.hidden_act, eps=c.rms_norm_eps,
    )  # fmt: skip
    arch = read(
        c, kinds=kinds, qk_norm="head", attn_gate=True, state=delta, norm=NormKind(eps=c.rms_norm_eps, plus_one=True),
        names=((r"\.linear_attn\.", ".mixer."),), ignore=(r"^(model\.)?mtp\.",), **over,
    )  # fmt: skip
    return _mixers(arch, kinds)


def _gated_experts(c: View, *, renorm: bool) -> MoeKind:
    return MoeKind(
        c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, renorm=renorm, round_weights=True,
        shared_ffn=c.shared_expert_intermediate_size, shared_gate=True,
    )  # fmt: skip


def qwen3_next(c: View) -> Arch:
    arch = _gated_delta(c, moe=_gated_experts(c, renorm=c.norm_topk_prob), state_layout="per_key_head")
    dense, step = c.get("mlp_only_layers", default=[]), c.decoder_sparse_step
    return each(arch, lambda i, layer: {"moe": i not in dense and (i + 1) % step == 0})


def qwen3_5(c: View) -> Arch:
    return _gated_delta(c)


def qwen3_5_moe(c: View) -> Arch:
    return each(_gated_delta(c, moe=_gated_experts(c, renorm=True)), lambda i, layer: {"moe": True})


_OLMO_NAMES = (
    (r"\.linear_attn\.([qkvab])_proj\.", r".mixer.in_proj_\1."),
    (r"\.linear_attn\.g_proj\.", ".mixer.in_proj_z."),
    (r"\.linear_attn\.o_proj\.", ".mixer.out_proj."),
    (r"\.linear_attn\.o_norm\.", ".mixer.norm."),
    (r"\.linear_attn\.([qkv])_conv1d\.", r".mixer.conv1d_\1."),
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"\.linear_attn\.", ".mixer."),
)


def olmo_hybrid(c: View) -> Arch:
    """Norms before states; norms after attention."""
    count, heads = c.num_hidden_layers, c.num_attention_heads
    kinds = c.get("layer_types")
    if kinds is None:
        kinds = [FULL if i % 4 == 3 or (count < 4 and i == count - 1) else STATE for i in range(count)]
    key_heads = c.get("linear_num_key_heads", default=heads)
    key_dim = c.get("linear_key_head_dim", default=int(0.75 * c.hidden_size / key_heads))
    delta = DeltaKind(
        key_heads, c.get("linear_num_value_heads", default=heads), key_dim,
        c.get("linear_value_head_dim", default=2 * key_dim), conv=c.linear_conv_kernel_dim, act=c.hidden_act, eps=1e-5,
        beta_scale=2.0 if c.linear_allow_neg_eigval else 1.0,
    )  # fmt: skip
    arch = read(c, kinds=kinds, qk_norm="full", state=delta, names=_OLMO_NAMES)
    if (c.get("rope_parameters") or {}).get("rope_theta", 0) is None:  # such a config has no rotary embedding
        arch = _no_rope(arch)
    return _mixers(each(arch, lambda i, layer: {"order": "post" if kinds[i] in _ATTENDS else "pre"}), kinds)


_KIMI_NAMES = (
    (r"\.mixer\.forget_gate\.", ".mixer."),
    (r"\.mixer\.([qkv])_proj\.", r".mixer.in_proj_\1."),
    (r"\.mixer\.([qkv])_conv1d\.", r".mixer.conv1d_\1."),
    (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
    (r"\.mixer\.o_norm\.", ".mixer.norm."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
)


def kimi_linear(c: View) -> Arch:
    """Most layers decay per channel; the others have latent attention, without rotary embeddings."""
    count, linear = c.num_hidden_layers, c.get("linear_attn_config", default={})
    kinds = c.get("layer_types")
    if kinds is None:
        full = [i - 1 for i in linear.get("full_attn_layers", [i + 1 for i in range(4, count, 4)])]
        kinds = [FULL if i in full else STATE for i in range(count)]
    dense = c.get("first_k_dense_replace", default=1)
    sparse = c.get("mlp_layer_types", default=["dense" if i < dense else "sparse" for i in range(count)])
    kind = KdaKind(
        linear.get("num_heads") or c.linear_num_heads, linear.get("head_dim") or c.linear_head_dim,
        conv=linear.get("short_conv_kernel_size") or c.linear_conv_kernel_dim, act=c.hidden_act, eps=c.rms_norm_eps,
    )  # fmt: skip
    mla = Mla(c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.maybe("q_lora_rank") or 0)
    moe = MoeKind(
        c.get("num_experts", "num_local_experts"), c.get("num_experts_per_token", "num_experts_per_tok"),
        c.moe_intermediate_size, score="sigmoid", select_bias=True, groups=c.get("num_expert_group", "n_group"),
        top_groups=c.topk_group, group_score="top2sum", renorm=c.get("moe_renormalize", "norm_topk_prob"),
        router_wide=True, scale=c.routed_scaling_factor,
        shared_ffn=c.moe_intermediate_size * c.get("num_shared_experts", "n_shared_experts"),
    )  # fmt: skip
    states = "|".join(str(i) for i, one in enumerate(kinds) if one == STATE) or "none"
    arch = read(
        c, kinds=kinds, mla=mla, head_dim=mla.rope, attn_scale=(mla.nope + mla.rope) ** -0.5, state=kind, moe=moe,
        max_positions=c.get("model_max_length", "max_position_embeddings"),
        names=((rf"\.layers\.({states})\.self_attn\.", r".layers.\1.mixer."), *_KIMI_NAMES),
    )  # fmt: skip
    return _mixers(each(_no_rope(arch), lambda i, layer: {"moe": sparse[i] == "sparse"}), kinds)


# --- Mamba 2 ---------------------------------------------------------------------------------------------------------


def mamba2(c: View) -> Arch:
    kind = Mamba2Kind(
        c.num_heads, c.head_dim, c.state_size, groups=c.n_groups, conv=c.conv_kernel, conv_bias=c.use_conv_bias,
        bias=c.use_bias, out_bias=c.use_bias, act=c.hidden_act, eps=c.layer_norm_epsilon, dt_limit=_limit(c),
    )  # fmt: skip
    return _only_states(c, kind)


_BLOCK_NAMES = (
    (r"\.mamba\.", ".mixer."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.final_layernorm\.", ".norm."),
)


def _mamba2_of(c: View, inner: int, **over: Any) -> Mamba2Kind:
    head_dim = c.mamba_d_head if c.mamba_d_head != "auto" else inner // c.mamba_n_heads
    over = dict(out_bias=c.mamba_proj_bias) | over
    return Mamba2Kind(
        c.mamba_n_heads, head_dim, c.mamba_d_state, groups=c.mamba_n_groups, conv=c.mamba_d_conv,
        conv_bias=c.mamba_conv_bias, bias=c.mamba_proj_bias, act=c.hidden_act, eps=c.rms_norm_eps, dt_limit=_limit(c),
        **over,
    )  # fmt: skip


def bamba(c: View) -> Arch:
    attends = c.get("attn_layer_indices", default=())
    kinds = [FULL if i in attends else STATE for i in range(c.num_hidden_layers)]
    kind = _mamba2_of(c, c.mamba_expand * c.hidden_size)
    return _mixers(read(c, kinds=kinds, state=kind, names=_BLOCK_NAMES), kinds)


def falcon_h1(c: View) -> Arch:
    """Attention and Mamba 2 side by side in every layer, with a scale on every projection."""
    kind = _mamba2_of(
        c, c.get("mamba_d_ssm") or c.mamba_expand * c.hidden_size, norm=c.mamba_rms_norm, norm_groups=c.mamba_n_groups,
        norm_first=c.mamba_norm_before_gate, out_bias=c.projectors_bias,
        scales=tuple(c.get("ssm_multipliers", default=(1.0,) * 5)),
    )  # fmt: skip
    gate, down = c.get("mlp_multipliers", default=(1.0, 1.0))
    fold = (
        (r"\.mixer\.in_proj\.weight$", c.ssm_in_multiplier),
        (r"\.mixer\.out_proj\.", c.ssm_out_multiplier),
        (r"\.self_attn\.[qkv]_proj\.weight$", c.attention_in_multiplier),
        (r"\.self_attn\.k_proj\.", c.key_multiplier),
        (r"\.self_attn\.o_proj\.", c.attention_out_multiplier),
        (r"\.mlp\.gate_proj\.", gate),
        (r"\.mlp\.down_proj\.", down),
    )
    arch = read(
        c, kinds=[FULL] * c.num_hidden_layers, state=kind, fold=fold, names=_BLOCK_NAMES,
        embed_scale=c.embedding_multiplier, logit_scale=c.lm_head_multiplier,
    )  # fmt: skip
    return each(arch, lambda i, layer: {"mixer": "both"})


def granite_hybrid(c: View) -> Arch:
    kinds = c.get("layer_types", default=[STATE] * c.num_hidden_layers)
    moe, shared = None, "mlp"
    if c.num_local_experts:
        shared = "mlp.shared_expert"
        moe = MoeKind(
            c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, score="topk_softmax", round_weights=True,
            shared_ffn=c.shared_intermediate_size,
        )  # fmt: skip
    names = (
        (r"\.mamba\.", ".mixer."),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.router\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.shared_mlp\.input_linear\.", f".{shared}.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", f".{shared}.down_proj."),
    )
    kind = _mamba2_of(c, c.mamba_expand * c.hidden_size)
    arch = granite(c, state=kind, moe=moe, names=names, ffn=c.shared_intermediate_size)
    arch = each(arch, lambda i, layer: {"moe": moe is not None})
    return _mixers(arch if c.maybe("position_embedding_type") == "rope" else _no_rope(arch), kinds)


_NEMOTRON_KINDS = {"M": STATE, "E": "moe", "*": FULL, "-": "mlp", "mamba": STATE, "attention": FULL}


def nemotron_h(c: View) -> Arch:
    """Every layer is one of Mamba 2, attention, an mlp or experts."""
    types = c.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    kinds = [_NEMOTRON_KINDS.get(kind, kind) for kind in types]
    state = Mamba2Kind(
        c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, groups=c.get("mamba_n_groups", "n_groups"),
        conv=c.get("mamba_d_conv", "conv_kernel"), conv_bias=c.get("mamba_conv_bias", "use_conv_bias"), bias=c.use_bias,
        out_bias=c.use_bias, act=c.mamba_hidden_act, eps=c.layer_norm_epsilon,
        norm_groups=c.get("mamba_n_groups", "n_groups"),
        dt_limit=(c.get("mamba_dt_min", "time_step_min"), float("inf")),
    )  # fmt: skip
    moe = MoeKind(
        c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size, score="sigmoid", select_bias=True,
        groups=c.n_group, top_groups=c.topk_group, group_score="top2sum", renorm=c.norm_topk_prob,
        scale=c.routed_scaling_factor, router_wide=True, gated=False, latent=c.maybe("moe_latent_size") or 0,
        shared_ffn=c.moe_shared_expert_intermediate_size,
    )  # fmt: skip
    attends, mixes = ("|".join(str(i) for i, kind in enumerate(kinds) if kind in those) or "none"
                      for those in ((FULL,), ("mlp", "moe")))  # fmt: skip
    names = (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings?\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.layers\.(\d+)\.norm\.", r".layers.\1.input_layernorm."),
        (rf"\.layers\.({attends})\.mixer\.", r".layers.\1.self_attn."),
        (rf"\.layers\.({mixes})\.mixer\.", r".layers.\1.mlp."),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    )
    layers = [Layer(mixer={FULL: "attention", STATE: "state"}.get(kind, "none"), moe=kind == "moe") for kind in kinds]
    return Arch(
        vocab=c.vocab_size, width=c.hidden_size, heads=c.num_attention_heads, head_dim=c.head_dim,
        kv_heads=c.maybe("num_key_value_heads") or c.num_attention_heads, ffn=c.intermediate_size,
        layers=tuple(layers), max_positions=c.max_position_embeddings, order="single",
        norm=NormKind(eps=c.layer_norm_epsilon), state=state, moe=moe, act=c.mlp_hidden_act, gated=False,
        mlp_bias=c.mlp_bias, tie=c.tie_word_embeddings, names=names, ignore=(r"^(model\.)?mtp\.",),
    )  # fmt: skip


def zamba2(c: View) -> Arch:
    """Mamba 2 throughout; some layers first run one of a few shared transformer blocks."""
    kinds, width, heads = c.layers_block_type, c.hidden_size, c.num_attention_heads
    users = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    size, blocks = 2 * width // heads, c.num_mem_blocks
    shared = SharedKind(
        heads, c.maybe("num_key_value_heads") or heads, size, c.get("intermediate_size") or 4 * width,
        (size / 2) ** -0.5, users, blocks, act=c.hidden_act, bias=c.add_bias_linear, rank=c.adapter_rank,
        attn_adapters=c.use_shared_attention_adapter,
    )  # fmt: skip
    state = Mamba2Kind(
        c.n_mamba_heads, int(c.mamba_expand * width) // c.n_mamba_heads, c.mamba_d_state, groups=c.mamba_ngroups,
        conv=c.mamba_d_conv, bias=c.add_bias_linear, out_bias=c.add_bias_linear, norm_groups=c.mamba_ngroups,
        dt_limit=(c.time_step_min, float("inf")),
    )  # fmt: skip
    names = [(r"\.mamba_decoder\.", "."), (r"\.mamba\.", ".mixer."), (r"^model\.final_layernorm\.", "model.norm.")]
    for use, user in enumerate(users):
        names.append((rf"^model\.layers\.{user}\.shared_transformer\.", f"model.shared.{use % blocks}."))
    for use, user in enumerate(users):
        for index, part in enumerate(("narrow", "widen")):
            here, there = r"^model\.shared\.\d+\.\w+\.", rf"model.layers.{user}.adapter."
            names.append((rf"{here}linear_([qkv])_adapter_list\.{use}\.{index}\.", rf"{there}\1_{part}."))
            names.append((rf"{here}gate_up_proj_adapter_list\.{use}\.{index}\.", rf"{there}mlp_{part}."))
    names += [(r"\.feed_forward\.", ".mlp."), (r"\.pre_ff_layernorm\.", ".post_attention_layernorm.")]
    rope = rope_kind(c, c.get("rope_parameters") or {}, size) if c.use_mem_rope else None
    layers = [Layer(mixer="state", order="shared", rope=rope) if i in users else Layer(mixer="state")
              for i in range(len(kinds))]  # fmt: skip
    return Arch(
        vocab=c.vocab_size, width=width, heads=heads, kv_heads=shared.kv_heads, head_dim=size, ffn=shared.ffn,
        layers=tuple(layers), max_positions=16384 if c.use_long_context else c.max_position_embeddings, order="single",
        norm=NormKind(eps=c.rms_norm_eps), state=state, shared=shared, tie=c.tie_word_embeddings, names=tuple(names),
    )  # fmt: skip


# --- Mamba 1 ---------------------------------------------------------------------------------------------------------


def mamba(c: View, **over: Any) -> Arch:
    rank = math.ceil(c.hidden_size / 16) if c.time_step_rank == "auto" else c.time_step_rank
    kind = MambaKind(
        c.get("intermediate_size") or int(c.expand * c.hidden_size), c.state_size, rank, conv=c.conv_kernel,
        conv_bias=c.use_conv_bias, bias=c.use_bias, act=c.hidden_act, **over,
    )  # fmt: skip
    return _only_states(c, kind)


def falcon_mamba(c: View) -> Arch:
    return mamba(c, norm_eps=c.mixer_rms_eps, norm_weights=False)


def jamba(c: View) -> Arch:
    count = c.num_hidden_layers
    kinds = [FULL if i % c.attn_layer_period == c.attn_layer_offset else STATE for i in range(count)]
    rank = math.ceil(c.hidden_size / 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
    kind = MambaKind(
        c.mamba_expand * c.hidden_size, c.mamba_d_state, rank, conv=c.mamba_d_conv, conv_bias=c.mamba_conv_bias,
        bias=c.mamba_proj_bias, act=c.hidden_act, norm_eps=c.rms_norm_eps,
    )  # fmt: skip
    moe = MoeKind(c.num_experts, c.num_experts_per_tok, c.intermediate_size, renorm=False, round_weights=True)
    names = (*_BLOCK_NAMES, (r"\.mlp\.router\.", ".mlp.gate."))
    arch = _no_rope(read(c, kinds=kinds, state=kind, moe=moe, names=names))
    sparse, period, offset = c.num_experts > 1, c.expert_layer_period, c.expert_layer_offset
    return _mixers(each(arch, lambda i, layer: {"moe": sparse and i % period == offset}), kinds)


# --- lightning attention ---------------------------------------------------------------------------------------------


def minimax(c: View) -> Arch:
    """Experts throughout; most layers have a decaying state. A norm's output becomes the stream."""
    count, heads = c.num_hidden_layers, c.num_attention_heads
    kinds = c.get("layer_types", default=[STATE if i % 2 else FULL for i in range(count)])
    arch = mixtral(c, kinds=kinds)
    linear = "|".join(str(i) for i, kind in enumerate(kinds) if kind == STATE) or "none"
    names = (*arch.names, (rf"\.layers\.({linear})\.self_attn\.", r".layers.\1.mixer."))
    factors = {
        kind: tuple(
            float(c.get(f"{part}_{name}_factor", default=1)) for part in (key, "mlp") for name in ("alpha", "beta")
        )
        for kind, key in ((FULL, "full_attn"), (STATE, "linear_attn"))
    }
    arch = each(
        arch,
        lambda i, layer: {
            "joins": factors[kinds[i]], "fade": 1 - i / (count - 1 + 1e-5) + 1e-5,
            "rope": layer.rope if kinds[i] == FULL else None,
        },
        order="kept", names=names, qkv_layout="per_head", state=LightningKind(heads, arch.head_dim, c.hidden_act),
        ignore=(r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$",),
    )  # fmt: skip
    return _mixers(arch, kinds)


# --- short convolutions ----------------------------------------------------------------------------------------------

_LFM2_NAMES = (
    (r"\.layers\.(\d+)\.conv\.(in_proj|out_proj|conv)\.", r".layers.\1.mixer.\2."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.mlp\.(experts\.\d+\.)?w1\.", r".mlp.\1gate_proj."),
    (r"\.mlp\.(experts\.\d+\.)?w3\.", r".mlp.\1up_proj."),
    (r"\.mlp\.(experts\.\d+\.)?w2\.", r".mlp.\1down_proj."),
    (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"^model\.embedding_norm\.", "model.norm."),
)


def _short_conv(c: View, kinds: Sequence[str], **over: Any) -> Arch:
    arch = read(
        c, kinds=kinds, state=ShortConvKind(c.conv_L_cache, bias=c.conv_bias), qk_norm="head", names=_LFM2_NAMES,
        norm=NormKind(eps=c.norm_eps), tie=c.get("tie_embedding", "tie_word_embeddings"), **over,
    )  # fmt: skip
    return _mixers(arch, kinds)


def lfm2(c: View) -> Arch:
    attends = c.get("full_attn_idxs", default=range(c.num_hidden_layers))
    kinds = c.get("layer_types", default=[FULL if i in attends else "conv" for i in range(c.num_hidden_layers)])
    ffn = c.get("block_ff_dim", "intermediate_size")
    if c.block_auto_adjust_ff_dim:
        ffn = int(2 * ffn / 3)
        if c.maybe("block_ffn_dim_multiplier") is not None:
            ffn = -(-int(c.block_ffn_dim_multiplier * ffn) // c.block_multiple_of) * c.block_multiple_of
    return _short_conv(c, kinds, ffn=ffn)


def lfm2_moe(c: View) -> Arch:
    moe = MoeKind(
        c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, score="sigmoid", select_bias=c.use_expert_bias,
        renorm=c.norm_topk_prob, scale=c.routed_scaling_factor,
    )  # fmt: skip
    arch = _short_conv(c, c.get("layer_types", default=[FULL] * c.num_hidden_layers), moe=moe)
    return each(arch, lambda i, layer: {"moe": i >= c.num_dense_layers})
