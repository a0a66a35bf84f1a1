"""Small dense families close to Llama: different norms, different rotary embeddings, different positions of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.arch import Arch, each, with_rope
from quire.models.view import FULL, SLIDING, View, read
from quire.models.zoo.deepseek import latent
from quire.models.zoo.gemma import gemma2
from quire.models.zoo.granite import granite


def ministral(c: View) -> Arch:
    return read(c, kinds=[SLIDING if c.maybe("sliding_window") else FULL] * c.num_hidden_layers)


def cwm(c: View) -> Arch:
    return read(c, kinds=[SLIDING if i % 4 else FULL for i in range(c.num_hidden_layers)])


def ernie4_5(c: View, **over: Any) -> Arch:
    bias = c.use_bias
    return with_rope(read(c, qkv_bias=bias, o_bias=bias, mlp_bias=bias, **over), pairs=True, wide=True)


def apertus(c: View) -> Arch:
    names = (
        (r"\.attention_layernorm\.", ".input_layernorm."),
        (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
    )
    return read(c, qk_norm="head", gated=False, names=names, ignore=(r"\.act_fn\.(beta|eps)$",))


def bitnet(c: View) -> Arch:
    return read(c, inner_norms=("attn_sub_norm", "ffn_sub_norm"))


def jais2(c: View) -> Arch:
    arch = read(c, gated=False)
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True))


def nanochat(c: View) -> Arch:
    """Norms without weights, one of them on the embeddings; rotated in the opposite direction."""
    arch = read(
        c, gated=False, embed_norm=True, qk_norm="head", qk_norm_late=True,
        logit_softcap=c.maybe("final_logit_softcapping") or 0.0,
        names=((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")),
    )  # fmt: skip
    return with_rope(replace(arch, norm=replace(arch.norm, weight=False)), back=True)


def hunyuan(c: View, **over: Any) -> Arch:
    names = ((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm."), *over.pop("names", ()))
    return read(c, qk_norm="head", qk_norm_late=True, mlp_bias=False, names=names, **over)


def hyperclovax(c: View) -> Arch:
    size = c.maybe("head_dim") or c.hidden_size // c.num_attention_heads
    arch = granite(c, attn_scale=c.maybe("attention_multiplier") or size**-0.5, logit_scale=c.logits_scaling)
    if not c.use_post_norm:
        return arch
    names = (
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_norm1\.", ".post_attention_layernorm."),
        (r"\.post_norm2\.", ".post_feedforward_layernorm."),
    )
    return replace(arch, order="sandwich", names=names)


def granite_swa(c: View, **over: Any) -> Arch:
    """Granite with windows, sinks and possibly a rotary base per layer (0: none)."""
    kinds = [SLIDING if i % 4 else FULL for i in range(c.num_hidden_layers)]
    arch, bases = granite(c, kinds=kinds, sinks=True, **over), c.get("layer_rope_theta")
    if not bases:
        return arch
    ropes = [
        replace(layer.rope, theta=base) if layer.rope and base else None
        for layer, base in zip(arch.layers, bases, strict=True)
    ]
    return each(arch, lambda i, layer: {"rope": ropes[i]})


def vaultgemma(c: View) -> Arch:
    names = ((r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),)
    return replace(gemma2(c), order="pre", names=names)


def youtu(c: View) -> Arch:
    return latent(c, pairs=c.rope_interleave, wide=False)


def minicpm3(c: View) -> Arch:
    count, width = c.num_hidden_layers, c.hidden_size
    arch = latent(c, pairs=False, wide=False, value=c.maybe("v_head_dim") or width // c.num_attention_heads)
    depth, base = c.maybe("scale_depth") or count**0.5, c.maybe("dim_model_base") or width
    return replace(arch, embed_scale=c.scale_emb, residual_scale=depth / count**0.5, logit_scale=base / width)
