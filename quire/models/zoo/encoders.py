"""Encoders: BERT and its relatives."""

from __future__ import annotations

from typing import Any

from quire.layers.norm import NormKind
from quire.layers.relative import RelativeKind
from quire.models.arch import Arch, Layer, each
from quire.models.encoder import EncoderArch
from quire.models.view import FULL, SLIDING, View, read, rope_parameters

# Heads of trained checkpoints, and buffers that some save.
_IGNORE = (
    r"^(cls|lm_head|pooler|classifier|score|qa_outputs|vocab_\w+|pre_classifier|head|decoder|predictions)\.",
    r"(^|\.)(pooler|position_ids|token_type_ids)(\.|$)",
)
_TRUNK = (r"^(bert|roberta|electra|distilbert|mpnet|nomic_bert|gte|new|model|ernie|camembert)\.", "")
_EMBED = (
    (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "model.embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    (r"^(embeddings\.(LayerNorm|norm)|emb_ln)\.", "model.embed_norm."),
    (r"^embeddings_project\.", "model.project_in."),
)
_NORMS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))  # early checkpoints
_BERT = (
    *_NORMS, _TRUNK, *_EMBED,
    (r"^encoder\.relative_attention_bias\.", "model.relative."),
    (r"^(encoder|transformer)\.layer\.", "model.layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
    (r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.(output\.dense|out_lin)\.", ".self_attn.o_proj."),
    (r"\.(attention\.(output\.)?LayerNorm|sa_layer_norm)\.", ".input_layernorm."),
    (r"\.(output\.LayerNorm|output_layer_norm)\.", ".post_attention_layernorm."),
    (r"\.(intermediate\.dense|ffn\.lin1)\.", ".mlp.up_proj."),
    (r"\.(output\.dense|ffn\.lin2)\.", ".mlp.down_proj."),
)  # fmt: skip
_ROPED = (
    _TRUNK, *_EMBED,
    (r"^(encoder\.)?layers?\.", "model.layers."),
    (r"\.(attention|attn|mixer)\.(qkv_proj|Wqkv)\.", ".self_attn.qkv_proj."),
    (r"\.(attention|attn|mixer|self_attn)\.(o_proj|out_proj|Wo)\.", ".self_attn.o_proj."),
    (r"\.(attn_ln|norm1|post_attention_layernorm)\.", ".input_layernorm."),
    (r"\.(mlp_ln|norm2|post_mlp_layernorm)\.", ".post_attention_layernorm."),
    (r"\.mlp\.(up_gate_proj|Wi)\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.(fc11|fc1)\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.(fc2|Wo)\.", ".mlp.down_proj."),
)  # fmt: skip


def _norm(c: View, eps: float, *, bias: bool = True) -> NormKind:
    return NormKind("layer", c.get("layer_norm_eps", "layer_norm_epsilon", "norm_eps", default=eps), bias=bias)


def bert(c: View, *, first: int = 0, **over: Any) -> EncoderArch:
    """`first`: rows of the position table before that of the first token."""
    if c.get("position_embedding_type", default="absolute") != "absolute":
        c.refuse("position_embedding_type", "only absolute positions are declared")
    width, heads, inner = c.hidden_size, c.num_attention_heads, c.get("embedding_size", default=0)
    core = Arch(
        vocab=c.vocab_size, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=c.intermediate_size,
        layers=(Layer(),) * c.num_hidden_layers, max_positions=c.max_position_embeddings - first, order="after",
        norm=_norm(c, 1e-12), embed_norm=True, final_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False,
        act=c.get("hidden_act", default="gelu"), positions=c.max_position_embeddings, position_offset=first,
        embed_width=inner if inner != width else 0, names=_BERT, ignore=_IGNORE,
    )  # fmt: skip
    return EncoderArch(core, **{"types": c.get("type_vocab_size", default=2), "inner_bias": True} | over)


def jina_v2(c: View) -> EncoderArch:
    """BERT whose scores fall with the distance on either side (ALiBi) in place of positions, and with a gated mlp."""
    if (positions := c.get("position_embedding_type", default="alibi")) != "alibi":
        c.refuse("position_embedding_type", f"JinaBert is declared with alibi, not {positions!r:.40}")
    kind = c.get("feed_forward_type", default="geglu")
    if kind not in ("geglu", "reglu"):
        c.refuse("feed_forward_type", "geglu and reglu are declared")
    width, heads = c.hidden_size, c.num_attention_heads
    names = (
        (r"\.mlp\.gated_layers\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.wo\.", ".mlp.down_proj."),
        (r"\.mlp\.layernorm\.", ".post_attention_layernorm."),
        *_BERT,
    )  # fmt: skip
    core = Arch(
        vocab=c.vocab_size, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=c.intermediate_size,
        layers=(Layer(),) * c.num_hidden_layers, max_positions=c.max_position_embeddings, order="after",
        norm=_norm(c, 1e-12), embed_norm=True, final_norm=False, qkv_bias=True, o_bias=True, mlp_bias=False,
        down_bias=True, act={"geglu": "gelu", "reglu": "relu"}[kind], alibi=1.0, names=names, ignore=_IGNORE,
    )  # fmt: skip
    return EncoderArch(core, types=c.get("type_vocab_size", default=2))


def roberta(c: View) -> EncoderArch:
    return bert(c, first=c.get("pad_token_id", default=1) + 1)


def mpnet(c: View) -> EncoderArch:
    return bert(c, first=2, types=0, relative=RelativeKind(c.get("relative_attention_num_buckets", default=32)))


def distilbert(c: View) -> EncoderArch:
    core = Arch(
        vocab=c.vocab_size, width=c.dim, heads=c.n_heads, kv_heads=c.n_heads, head_dim=c.dim // c.n_heads,
        ffn=c.hidden_dim, layers=(Layer(),) * c.n_layers, max_positions=c.max_position_embeddings, order="after",
        norm=NormKind("layer", 1e-12, bias=True), embed_norm=True, final_norm=False, qkv_bias=True, o_bias=True,
        mlp_bias=True, gated=False, act=c.get("activation", default="gelu"), positions=c.max_position_embeddings,
        names=_BERT, ignore=_IGNORE,
    )  # fmt: skip
    return EncoderArch(core)


def _roped(c: View, theta: float, eps: float, **over: Any) -> Arch:
    """BERT's order of norms, rotary embeddings."""
    params = dict(rope_parameters(c, FULL))
    params.setdefault("rope_theta", c.get("rope_theta", "rotary_emb_base", default=theta))
    heads = c.get("num_attention_heads", "n_head")
    size = c.get("head_dim") or c.get("hidden_size", "n_embd") // heads
    return read(c, ropes=lambda _, kind: params, order="after", norm=_norm(c, eps), embed_norm=True, final_norm=False,
                kv_heads=heads, head_dim=size, names=_ROPED, ignore=_IGNORE, **over)  # fmt: skip


def nomic_bert(c: View) -> EncoderArch:
    act = c.get("hidden_act", "activation_function", default="silu")
    act = {"swiglu": "silu", "geglu": "gelu"}.get(act, act)
    bias = bool(c.get("qkv_proj_bias", default=False))
    core = _roped(c, 1000.0, 1e-12, act=act, qkv_bias=bias, o_bias=bias, mlp_bias=bool(c.get("mlp_fc1_bias") or False))
    return EncoderArch(core, types=c.get("type_vocab_size", default=2))


def jina_v3(c: View) -> EncoderArch:
    core = _roped(c, 20000.0, 1e-5, act=c.get("hidden_act", default="gelu"), qkv_bias=True, o_bias=True, mlp_bias=True,
                  gated=False)  # fmt: skip
    return EncoderArch(core, types=c.get("type_vocab_size", default=1))


def gte(c: View) -> EncoderArch:
    core = _roped(c, 160000.0, 1e-12, act=c.get("hidden_act", default="gelu"), qkv_bias=True, o_bias=True,
                  mlp_bias=False, down_bias=True, up_first=True)  # fmt: skip
    return EncoderArch(core, types=c.get("type_vocab_size", default=1))


def modernbert(c: View) -> EncoderArch:
    """Norms before; most layers see a stretch on either side, with a rope of their own."""
    count, every = c.num_hidden_layers, c.get("global_attn_every_n_layers", default=3)
    kinds = c.get("layer_types", default=[SLIDING if i % every else FULL for i in range(count)])
    theta = {FULL: c.get("global_rope_theta", default=160000.0), SLIDING: c.get("local_rope_theta", default=10000.0)}

    def ropes(view: View, kind: str) -> dict[str, Any]:
        return {"rope_theta": theta[kind]} | dict(rope_parameters(view, kind))

    bias, mlp_bias = bool(c.get("attention_bias", default=False)), bool(c.get("mlp_bias", default=False))
    names = (
        (r"^model\.", ""), *_EMBED,
        (r"^final_norm\.", "model.norm."),
        (r"^layers\.", "model.layers."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.Wo\.", ".self_attn.o_proj."),
        (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
    )  # fmt: skip
    core = read(
        c, kinds=kinds, ropes=ropes, norm=_norm(c, 1e-5, bias=bool(c.get("norm_bias", default=False))), embed_norm=True,
        act=c.get("hidden_activation", default="gelu"), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, names=names,
        ignore=_IGNORE,
    )  # fmt: skip
    reach = c.get("local_attention", default=128) // 2 + 1
    core = each(core, lambda i, layer: {"window": reach if kinds[i] == SLIDING else 0})
    return EncoderArch(core, first_norm=False)


def eurobert(c: View) -> EncoderArch:
    """A bidirectional Llama; from a checkpoint with or without a head."""
    names = ((r"^(layers\.|embed_tokens\.|norm\.)", r"model.\1"),)
    return EncoderArch(read(c, kinds=[FULL] * c.num_hidden_layers, names=names, ignore=_IGNORE))
