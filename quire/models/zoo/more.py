"""Small families: Falcon, StarCoder2, StableLM, Nemotron, EXAONE 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.arch import Arch, each, with_window
from quire.models.view import FULL, SLIDING, View, every, read

_FALCON_NAMES = (
    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"^transformer\.h\.", "model.layers."),
    (r"\.ln_attn\.", ".input_layernorm."),
    (r"\.ln_mlp\.", ".post_attention_layernorm."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.dense_h_to_4h\.", ".up_proj."),
    (r"\.dense_4h_to_h\.", ".down_proj."),
)


def falcon(c: View) -> Arch:
    """Three generations: one kv head (7B), one per head (RW), groups (40B, 180B, 11B)."""
    heads = c.get("num_attention_heads", "n_head")
    new = c.new_decoder_architecture or bool(c.get("n_head_kv"))
    if new:
        kv_heads, layout = c.get("num_kv_heads", "n_head_kv", default=heads), "per_group"
        parallel, one_norm = True, c.get("num_ln_in_parallel_attn", default=2) == 1
    else:
        kv_heads, layout = (1, "") if c.multi_query else (heads, "per_head")
        parallel = one_norm = c.parallel_attn
    arch = read(
        c, order="parallel" if parallel else "pre", one_norm=one_norm, gated=False, act=c.activation,
        kv_heads=kv_heads, qkv_layout=layout, qkv_bias=c.bias, o_bias=c.bias, mlp_bias=c.bias, names=_FALCON_NAMES,
    )  # fmt: skip
    arch = replace(arch, norm=replace(arch.norm, kind="layer", bias=True))
    if c.alibi:  # slopes are scaled like the scores
        arch = each(replace(arch, alibi=arch.head_dim**-0.5), lambda i, layer: {"rope": None})
    return arch


def starcoder2(c: View) -> Arch:
    names = ((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))
    bias = c.use_bias
    arch = read(c, gated=False, qkv_bias=bias, o_bias=bias, mlp_bias=bias, names=names)
    return with_window(
        replace(arch, norm=replace(arch.norm, kind="layer", bias=True)), c.maybe("sliding_window")
    )  # fmt: skip


def stablelm(c: View) -> Arch:
    order: dict[str, Any] = dict(order="parallel", one_norm=True) if c.use_parallel_residual else {}
    names = ((r"\.(q|k)_layernorm\.norms\.", r".\1_norm."), (r"\.(q|k)_layernorm\.", r".\1_norm."))
    arch = read(
        c, qkv_bias=c.use_qkv_bias, o_bias=False, qk_norm="each" if c.qk_layernorm else "", names=names, **order
    )  # fmt: skip
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True))


def nemotron(c: View) -> Arch:
    arch = read(c, gated=False)
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True, plus_one=True))


def exaone4(c: View) -> Arch:
    count, window, pattern = c.num_hidden_layers, c.maybe("sliding_window"), c.get("sliding_window_pattern", default=4)
    if not window:
        kinds = [FULL] * count
    elif isinstance(pattern, str):  # such as LLLG: local and global
        kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
    else:
        kinds = every(pattern, count)
    arch = read(c, kinds=kinds, order="post", qk_norm="head", qkv_bias=False, o_bias=False)
    return each(arch, lambda i, layer: {} if not window or layer.window else {"rope": None})
