"""The classic line, continued: GPT-1, GPT-Neo, BigCode, CodeGen, MPT, Persimmon, XGLM, BioGPT, BART-like decoders."""

from __future__ import annotations

from typing import Any

from quire.layers.norm import NormKind
from quire.layers.rope import RopeKind
from quire.models.arch import Arch, each
from quire.models.view import FULL, SLIDING, View, read
from quire.models.zoo.gpt import BIASES, GPT2_NAMES, GPTJ_NAMES, NEOX_NAMES, classic, no_rope

_LAYER = (
    (r"\.out_proj\.", ".o_proj."),
    (r"(\.layers\.\d+)\.fc1\.", r"\1.mlp.up_proj."),
    (r"(\.layers\.\d+)\.fc2\.", r"\1.mlp.down_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(\.layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"^model\.layer_norm\.", "model.norm."),
)


def gpt_bigcode(c: View) -> Arch:
    """GPT-2 with one kv head, and matrices stored [out, in]."""
    scale = 0.0 if c.scale_attn_weights else 1.0
    layout: dict[str, Any] = dict(kv_heads=1) if c.multi_query else dict(qkv_layout="per_head")
    return no_rope(classic(c, positions=c.n_positions, names=GPT2_NAMES, attn_scale=scale, **layout, **BIASES))


def gpt_neo(c: View) -> Arch:
    """Attention without scale; alternating global and local layers."""
    kinds = c.get("attention_layers") or [
        kind for part, times in c.attention_types for _ in range(times) for kind in part
    ]
    names = (
        *GPT2_NAMES, (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),
    )  # fmt: skip
    arch = classic(
        c, kinds=[FULL if kind == "global" else SLIDING for kind in kinds], positions=c.max_position_embeddings,
        attn_scale=1.0, o_bias=True, mlp_bias=True, names=names, ignore=(r"\.attn\.attention\.(masked_)?bias$",),
    )  # fmt: skip
    return each(arch, lambda i, layer: {"rope": None, "window": 0 if kinds[i] == "global" else c.window_size})


def codegen(c: View) -> Arch:
    names = ((r"\.attn\.qkv_proj\.", ".self_attn.qkv_proj."), *GPTJ_NAMES)
    arch = classic(
        c, order="parallel", one_norm=True, mlp_bias=True, head_bias=True, names=names, qkv_layout="qvk_in_four",
        ignore=(r"\.attn\.causal_mask$",),
    )  # fmt: skip
    rope = RopeKind(dim=c.maybe("rotary_dim") or arch.head_dim, pairs=True)
    return each(arch, lambda i, layer: {"rope": rope})


def mpt(c: View) -> Arch:
    attn = c.get("attn_config", default={})
    names = (
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.norm_f\.", "model.norm."),
        (r"^transformer\.blocks\.", "model.layers."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.", ".mlp."),
        (r"\.norm_1\.", ".input_layernorm."),
        (r"\.norm_2\.", ".post_attention_layernorm."),
    )
    if not attn.get("alibi", True) or attn.get("qk_ln") or attn.get("prefix_lm"):
        c.refuse("attn_config", "transformers supports MPT only with alibi, without query norms and prefixes")
    return no_rope(
        read(
            c, gated=False, act="gelu", alibi=1.0, norm=NormKind("layer", eps=c.layer_norm_epsilon), names=names,
            ffn=4 * c.get("d_model", "hidden_size"), attn_scale=attn.get("softmax_scale") or 0.0,
            qkv_clip=attn.get("clip_qkv") or 0.0,
        )
    )  # fmt: skip


def openai_gpt(c: View) -> Arch:
    names = (
        *GPT2_NAMES, (r"^(?:transformer\.)?tokens_embed\.", "model.embed_tokens."),
        (r"^(?:transformer\.)?positions_embed\.", "model.embed_positions."),
    )  # fmt: skip
    act = {"gelu": "gelu_new"}.get(c.afn, c.afn)
    return no_rope(
        classic(
            c, order="after", final_norm=False, positions=c.n_positions, transposed=True, names=names, act=act,
            ffn=4 * c.n_embd, **BIASES,
        )
    )  # fmt: skip


def persimmon(c: View) -> Arch:
    names = (
        (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.(q|k)_layernorm\.", r".\1_norm."),
        (r"^model\.final_layernorm\.", "model.norm."),
        *NEOX_NAMES,
    )
    norm = "head" if c.qk_layernorm else ""
    return classic(c, qk_norm=norm, qk_norm_bias=True, qkv_layout="per_head", names=names, **BIASES)


def xglm(c: View) -> Arch:
    width = c.d_model
    arch = classic(
        c, positions=c.max_position_embeddings + 2, position_offset=2, position_kind="sines", names=_LAYER,
        embed_scale=width**0.5 if c.scale_embedding else 1.0, norm_eps=1e-5, **BIASES,
    )  # fmt: skip
    return no_rope(arch)


def biogpt(c: View) -> Arch:
    names = ((r"^biogpt\.", "model."), (r"^output_projection\.", "lm_head."), *_LAYER)
    scale = c.hidden_size**0.5 if c.scale_embedding else 1.0
    arch = classic(
        c, positions=c.max_position_embeddings + 2, position_offset=2, embed_scale=scale, names=names, norm_eps=1e-5,
        **BIASES,
    )  # fmt: skip
    return no_rope(arch)


# --- decoders of encoder-decoder models, used alone -------------------------------------------------------------------

_DECODER = (
    (r"^(?:model\.)?decoder\.layernorm_embedding\.", "model.embed_norm."),
    (r"^(?:model\.)?decoder\.", "model."),
    *_LAYER,
)


def _alone(c: View, *, before: bool, offset: int, **over: Any) -> Arch:
    """A decoder without its encoder: cross-attention is left out."""
    arch = classic(
        c, order="pre" if before else "after", final_norm=before, positions=c.max_position_embeddings + offset,
        position_offset=offset, embed_scale=c.d_model**0.5 if c.scale_embedding else 1.0, names=_DECODER,
        heads=c.decoder_attention_heads, kv_heads=c.decoder_attention_heads, ffn=c.decoder_ffn_dim, norm_eps=1e-5,
        head_dim=c.d_model // c.decoder_attention_heads,
        ignore=(r"\.encoder_attn(_layer_norm)?\.", r"^(model\.)?(encoder|shared)\.", "^final_logits_bias$"),
        **BIASES, **over,
    )  # fmt: skip
    return no_rope(arch)


def bart(c: View) -> Arch:
    return _alone(c, before=False, offset=2, embed_norm=True)


plbart = mvp = bart


def mbart(c: View) -> Arch:
    return _alone(c, before=True, offset=2, embed_norm=True)


def pegasus(c: View) -> Arch:
    return _alone(c, before=True, offset=0)


blenderbot = pegasus


def marian(c: View) -> Arch:
    return _alone(c, before=False, offset=0)
