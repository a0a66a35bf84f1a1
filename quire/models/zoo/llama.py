"""Llama and its closest relatives: pre-norm, gated mlp, grouped heads, rotary halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.moe import MoeKind
from quire.models.arch import Arch, each, with_rope, with_window
from quire.models.view import FULL, SLIDING, View, read


def llama(c: View) -> Arch:
    return read(c)


def mistral(c: View) -> Arch:
    return with_window(read(c), c.sliding_window)


def ministral3(c: View) -> Arch:
    arch = with_window(read(c), c.maybe("sliding_window"))
    scaling = (arch.layers[0].rope and arch.layers[0].rope.scaling) or {}
    beta = scaling.get("llama_4_scaling_beta") or 0.0
    return replace(arch, grow=(beta, scaling.get("original_max_position_embeddings", 1), 0))


def seed_oss(c: View) -> Arch:
    return read(c, o_bias=c.attention_out_bias)


def arcee(c: View) -> Arch:
    return read(c, gated=False)


def smollm3(c: View) -> Arch:
    count = c.num_hidden_layers
    uses_rope = c.get("no_rope_layers") or [int((i + 1) % c.no_rope_layer_interval != 0) for i in range(count)]
    slides = c.use_sliding_window and c.maybe("sliding_window")
    arch = read(c, kinds=[SLIDING if slides and not has_rope else FULL for has_rope in uses_rope])
    return each(arch, lambda i, layer: {} if uses_rope[i] else {"rope": None})


def helium(c: View) -> Arch:
    arch = with_rope(read(c, o_bias=False), pairs=True)
    return replace(arch, norm=replace(arch.norm, wide=True))


def mixtral(c: View, **over: Any) -> Arch:
    moe = MoeKind(c.get("num_local_experts", "num_experts"), c.num_experts_per_tok, c.intermediate_size)
    names = (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
    arch = with_window(read(c, qkv_bias=False, o_bias=False, moe=moe, names=names, **over), c.maybe("sliding_window"))
    return each(arch, lambda i, layer: {"moe": True})
