"""GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM and gpt-oss: the classic line, each with different names and layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.moe import MoeKind
from quire.layers.rope import RopeKind
from quire.models.arch import Arch, each
from quire.models.view import View, every, read

BIASES = dict(qkv_bias=True, o_bias=True, mlp_bias=True)


def classic(c: View, *, norm_eps: float = 0.0, **over: Any) -> Arch:
    """Layer norms with bias, no gate. `norm_eps`: if it is fixed in the code, not in the config."""
    arch = read(c, gated=False, **over)
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True, eps=norm_eps or arch.norm.eps))


def no_rope(arch: Arch) -> Arch:
    return each(arch, lambda i, layer: {"rope": None})


GPT2_NAMES = (
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
)


def gpt2(c: View) -> Arch:
    positions = c.get("n_positions", "max_position_embeddings")
    arch = no_rope(classic(c, positions=positions, transposed=True, names=GPT2_NAMES, **BIASES))
    scale = arch.head_dim**-0.5 if c.scale_attn_weights else 1.0
    if c.scale_attn_by_inverse_layer_idx:
        return each(arch, lambda i, layer: {"attn_scale": scale / (i + 1)})
    return replace(arch, attn_scale=scale)


GPTJ_NAMES = (
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.([qkv])_proj\.", r".self_attn.\1_proj."),
    (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
    (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
    (r"\.ln_1\.", ".input_layernorm."),
)


def gptj(c: View) -> Arch:
    arch = classic(c, order="parallel", one_norm=True, mlp_bias=True, head_bias=True, names=GPTJ_NAMES)
    rope = RopeKind(dim=c.maybe("rotary_dim") or arch.head_dim, pairs=True)
    return each(arch, lambda i, layer: {"rope": rope})


NEOX_NAMES = (
    (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
    (r"^gpt_neox\.layers\.", "model.layers."),
    (r"^embed_out\.", "lm_head."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.dense_h_to_4h\.", ".up_proj."),
    (r"\.dense_4h_to_h\.", ".down_proj."),
)


def gpt_neox(c: View) -> Arch:
    bias = c.attention_bias
    order = "parallel" if c.use_parallel_residual else "pre"
    return classic(
        c, order=order, qkv_bias=bias, o_bias=bias, mlp_bias=True, qkv_layout="per_head", names=NEOX_NAMES
    )  # fmt: skip


_OPT_NAMES = (
    (r"^(?:model\.)?decoder\.final_layer_norm\.", "model.norm."),
    (r"^(?:model\.)?decoder\.", "model."),
    (r"\.out_proj\.", ".o_proj."),
    (r"(\.layers\.\d+)\.fc1\.", r"\1.mlp.up_proj."),
    (r"(\.layers\.\d+)\.fc2\.", r"\1.mlp.down_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(\.layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
)


def opt(c: View) -> Arch:
    before, bias = c.do_layer_norm_before, c.enable_bias
    width = c.get("word_embed_proj_dim") or c.hidden_size
    arch = classic(
        c, order="pre" if before else "after", positions=c.max_position_embeddings + 2, position_offset=2,
        embed_width=0 if width == c.hidden_size else width, qkv_bias=bias, o_bias=bias, mlp_bias=bias,
        final_norm=bool(before) and not c.get("_remove_final_layer_norm", default=False), names=_OPT_NAMES,
    )  # fmt: skip
    affine = c.layer_norm_elementwise_affine
    return no_rope(replace(arch, norm=replace(arch.norm, eps=1e-5, weight=affine, bias=affine)))


_BLOOM_NAMES = (
    (r"^(?:transformer\.)?word_embeddings\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.dense_h_to_4h\.", ".up_proj."),
    (r"\.dense_4h_to_h\.", ".down_proj."),
)


def bloom(c: View) -> Arch:
    if c.apply_residual_connection_post_layernorm:
        c.refuse("apply_residual_connection_post_layernorm", "no released model adds the residual after the norm")
    return no_rope(
        classic(
            c, act="bloom_gelu", alibi=1.0, embed_norm=True, qkv_layout="per_head", names=_BLOOM_NAMES,
            ffn=c.get("n_inner", default=4 * c.get("hidden_size", "n_embed")), **BIASES,
        )
    )  # fmt: skip


def gpt_oss(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_local_experts", "num_experts"), c.get("num_experts_per_tok", "experts_per_token"),
        c.intermediate_size, score="topk_softmax", round_weights=True, router_bias=True, expert_bias=True,
        clamp=c.swiglu_limit, clamp_alpha=c.swiglu_alpha,
    )  # fmt: skip
    arch = read(
        c, kinds=every(2, c.num_hidden_layers), sinks=True, moe=moe, expert_layout="transposed_interleaved",
        names=((r"\.mlp\.router\.", ".mlp.gate."),),
    )  # fmt: skip
    arch = replace(arch, norm=replace(arch.norm, wide=True))
    return each(arch, lambda i, layer: {"moe": True})
