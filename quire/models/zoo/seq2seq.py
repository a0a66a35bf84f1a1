"""Encoder-decoder models: T5 and BART with their relatives, Whisper and Florence-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.norm import NormKind
from quire.layers.relative import RelativeKind
from quire.models.arch import Arch, Layer
from quire.models.encoder import EncoderArch
from quire.models.seq2seq import Seq2SeqArch
from quire.models.view import View

_ENDLESS = 1 << 20  # scores by distance have no maximum length

_T5 = (
    (r"^shared\.", "model.embed_tokens."),
    (r"^decoder\.block\.", "model.layers."),
    (r"^encoder\.block\.", "encoder.layers."),
    (r"^decoder\.final_layer_norm\.", "model.norm."),
    (r"^encoder\.final_layer_norm\.", "encoder.norm."),
    (r"^(model|encoder)\.layers\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"\1.relative."),
    (r"\.layer\.0\.SelfAttention\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.layer\.1\.EncDecAttention\.([qkvo])\.", r".cross_attn.\1_proj."),
    (r"\.layer\.0\.layer_norm\.", ".input_layernorm."),
    (r"^(model\.layers\.\d+)\.layer\.1\.layer_norm\.", r"\1.cross_layernorm."),
    (r"\.layer\.[12]\.layer_norm\.", ".post_attention_layernorm."),
    (r"\.layer\.[12]\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.layer\.[12]\.DenseReluDense\.(wi|wi_1)\.", ".mlp.up_proj."),
    (r"\.layer\.[12]\.DenseReluDense\.wo\.", ".mlp.down_proj."),
)


_EACH = (
    (r"^decoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"model.relative.\1."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"encoder.relative.\1."),
)


def t5(c: View, *, usual: str = "relu", scales: bool = True, each: bool = False) -> Seq2SeqArch:
    """`each`: every layer has its own scores by distance; else all have those of the first."""
    kind = c.get("feed_forward_proj", default=usual)
    act = {"gated-gelu": "gelu_new"}.get(kind, kind.removeprefix("gated-"))
    scaled = scales and c.get("scale_decoder_outputs", "tie_word_embeddings", default=True)
    count, heads = c.num_layers, c.num_heads
    common: dict[str, Any] = dict(
        vocab=c.vocab_size, width=c.d_model, heads=heads, kv_heads=heads, head_dim=c.d_kv, ffn=c.d_ff, attn_scale=1.0,
        max_positions=_ENDLESS, norm=NormKind(eps=c.get("layer_norm_epsilon", default=1e-6)), act=act,
        gated=kind.startswith("gated-"),
    )  # fmt: skip
    relative = RelativeKind(
        c.get("relative_attention_num_buckets", default=32), c.get("relative_attention_max_distance", default=128), each
    )
    decoder = Arch(
        layers=(Layer(),) * c.get("num_decoder_layers", default=count), order="cross_pre", cross=0,
        tie=bool(c.get("tie_word_embeddings", default=True)), logit_scale=c.d_model**-0.5 if scaled else 1.0, **common,
    )  # fmt: skip
    return Seq2SeqArch(
        EncoderArch(Arch(layers=(Layer(),) * count, **common), relative=relative), decoder,
        start=c.get("decoder_start_token_id", "pad_token_id", default=0), relative=relative,
        names=(*_EACH, *_T5) if each else _T5,
        ignore=(r"^(encoder|decoder)\.embed_tokens\.", r"EncDecAttention\.relative_attention_bias\."),
    )  # fmt: skip


def umt5(c: View) -> Seq2SeqArch:
    return t5(c, usual="gated-gelu", each=True)


def mt5(c: View) -> Seq2SeqArch:
    """The newer T5: logits are never scaled."""
    return t5(c, usual="gated-gelu", scales=False)


_BART = (
    (r"^model\.shared\.", "model.embed_tokens."),
    (r"^(model\.)?encoder\.", "encoder."),
    (r"^(model\.)?decoder\.", "model."),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.encoder_attn_layer_norm\.", ".cross_layernorm."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
    (r"\.layernorm_embedding\.", ".embed_norm."),
    (r"^(model|encoder)\.layer_norm\.", r"\1.norm."),
)


def _half(c: View, side: str, *, order: str, final: bool, positions: int | None = None, **over: Any) -> Arch:
    """`positions`: of a table without rows for other uses; None: BART's, with two of them."""
    heads, width = c.get(f"{side}_attention_heads"), c.d_model
    length = positions or c.max_position_embeddings
    common: dict[str, Any] = dict(
        vocab=c.vocab_size, width=width, heads=heads, kv_heads=heads, head_dim=width // heads,
        ffn=c.get(f"{side}_ffn_dim"), layers=(Layer(),) * c.get(f"{side}_layers"), order=order,
        max_positions=length, norm=NormKind("layer", 1e-5, bias=True), embed_norm=True,
        final_norm=final, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False,
        act=c.get("activation_function", default="gelu"), positions=length if positions else length + 2,
        position_offset=0 if positions else 2,
        embed_scale=width**0.5 if c.get("scale_embedding", default=False) else 1.0,
    )  # fmt: skip
    return Arch(**common | over)


def bart(c: View, *, order: str = "after", final: bool = False, **over: Any) -> Seq2SeqArch:
    decoder = _half(
        c, "decoder", order=f"cross_{order}", final=final, cross=c.max_position_embeddings, head_bias=True,
        tie=bool(c.get("tie_word_embeddings", default=True)), **over,
    )  # fmt: skip
    return Seq2SeqArch(
        EncoderArch(_half(c, "encoder", order=order, final=final, **over)), decoder,
        start=c.get("decoder_start_token_id", "eos_token_id", default=2), names=_BART,
        ignore=(r"^encoder\.embed_tokens\.", r"\.version$"),
    )  # fmt: skip


_FLORENCE = (
    (r"^(?:model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.)?language_model\.final_logits_bias$", "final_logits_bias"),
    (r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
)


def florence2(c: View) -> Seq2SeqArch:
    """BART, whose encoder reads the vectors of an image in its text."""
    text = c.text_config
    if text.get("model_type", "bart") not in ("bart", "florence2_language"):
        c.refuse("text_config", "its language model must be a BART")
    arch = bart(View(text, {}, "BartForConditionalGeneration"))
    tie = c.maybe("tie_word_embeddings")
    decoder = replace(arch.decoder, head_bias=False, tie=arch.decoder.tie if tie is None else bool(tie))
    return replace(
        arch, decoder=decoder, media_token=c.get("image_token_id", default=51289), names=(*_FLORENCE, *_BART),
        ignore=(*arch.ignore, r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.", r"^final_logits_bias$",
                r"^lm_head\.bias$"),
    )  # fmt: skip


def mbart(c: View) -> Seq2SeqArch:
    return bart(c, order="pre", final=True)


def pegasus(c: View) -> Seq2SeqArch:
    """mBART without a norm of the embeddings, and with positions that are no weights."""
    arch = bart(
        c, order="pre", final=True, positions=c.max_position_embeddings, position_kind="even_sines", embed_norm=False
    )
    ignore = (*arch.ignore, r"^(model|encoder)\.embed_positions\.")
    return replace(arch, start=c.get("decoder_start_token_id", "pad_token_id", default=0), ignore=ignore)


def whisper(c: View) -> Seq2SeqArch:
    heard, written = c.max_source_positions, c.max_target_positions
    common: dict[str, Any] = dict(final=True, embed_norm=False)
    decoder = _half(c, "decoder", order="cross_pre", positions=written, cross=heard, tie=True, **common)
    encoder = _half(c, "encoder", order="pre", positions=heard, embed_scale=1.0, **common)
    names = (*_BART, (r"^proj_out\.", "lm_head."))
    return Seq2SeqArch(
        EncoderArch(encoder, bins=c.num_mel_bins), decoder, start=c.get("decoder_start_token_id", default=50257),
        names=names, key_bias=False,
    )  # fmt: skip
