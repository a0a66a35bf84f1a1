"""Granite: Llama-like with explicit scales of embeddings, attention, residuals and logits; dense and with experts."""

from __future__ import annotations

from typing import Any

from quire.layers.moe import MoeKind
from quire.models.arch import Arch, each
from quire.models.view import View, read


def granite(c: View, **over: Any) -> Arch:
    return read(
        c,
        **{
            "attn_scale": c.maybe("attention_multiplier"),
            "embed_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": 1 / c.logits_scaling,
            **over,
        },
    )


def granite_moe(c: View) -> Arch:
    moe = MoeKind(
        c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, score="topk_softmax", round_weights=True
    )
    names = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.router\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.", ".mlp."),
    )
    return each(granite(c, moe=moe, names=names), lambda i, layer: {"moe": True})
