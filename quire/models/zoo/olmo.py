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


def molmo2_text(c: View) -> Arch:
    """Of Molmo 2: Qwen3 or OLMo 3 with its own names, and tokens beyond the vocabulary of its head."""
    added, after = c.get("additional_vocab_size", default=128), bool(c.get("norm_after", default=False))
    if (kind := c.get("qk_norm_type", default="qwen3")) not in _QK_NORMS:
        c.refuse("qk_norm_type", f"known are {', '.join(_QK_NORMS)}")
    bias = bool(c.get("attention_bias", "qkv_bias", default=False))
    arch = read(
        c, vocab=c.vocab_size + added, input_only=added, qk_norm=_QK_NORMS[kind], qkv_bias=bias, o_bias=False,
        mlp_bias=False, tie=False, order="post" if after else "pre", up_first=True, in_two=True,
        names=(*_MOLMO2, *(_AFTER if after else ())),
    )  # fmt: skip
    scaled = c.maybe("rope_scaling_layers")
    if scaled is None:
        return arch
    plain = [None if layer.rope is None else replace(layer.rope, scaling=None) for layer in arch.layers]
    return each(arch, lambda i, layer: {} if i in scaled else {"rope": plain[i]})


_QK_NORMS = {"qwen3": "head", "olmo": "full"}
# as released, and as transformers writes it
_MOLMO2 = (
    (r"^(?:model\.)?transformer\.wte\.embedding$", "model.embed_tokens.first"),
    (r"^(?:model\.)?transformer\.wte\.new_embedding$", "model.embed_tokens.others"),
    (r"^(?:model\.)?transformer\.ln_f\.", "model.norm."),
    (r"^(?:model\.)?transformer\.blocks\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.att_proj\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.attn_out\.", ".self_attn.o_proj."),
    (r"\.mlp\.ff_proj\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.ff_out\.", ".mlp.down_proj."),
)
# the two norms of a layer, after what they would stand before
_AFTER = (
    (r"\.post_attention_layernorm\.", ".post_feedforward_layernorm."),
    (r"\.input_layernorm\.", ".post_attention_layernorm."),
)


def olmoe(c: View) -> Arch:
    moe = MoeKind(
        c.get("num_experts", "num_local_experts"), c.num_experts_per_tok, c.intermediate_size,
        renorm=c.norm_topk_prob, round_weights=True,
    )  # fmt: skip
    arch = read(c, qk_norm="full", qkv_clip=c.get("clip_qkv", default=0.0), moe=moe)
    return each(arch, lambda i, layer: {"moe": True})
