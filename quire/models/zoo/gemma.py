"""Gemma 1 to 3: scaled embeddings, norm weights stored as distance from one, sandwich norms, soft caps, windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.arch import Arch
from quire.models.view import FULL, View, every, read, rope_parameters


def _gemma(c: View, **over: Any) -> Arch:
    arch = read(c, embed_scale=c.hidden_size**0.5, **over)
    return replace(arch, norm=replace(arch.norm, plus_one=True))


def gemma(c: View) -> Arch:
    return _gemma(
        c, act="gelu_pytorch_tanh" if c.hidden_act == "gelu" else c.hidden_act
    )  # releases that say gelu mean tanh


def _sandwich(c: View, **over: Any) -> Arch:
    return _gemma(
        c,
        act=c.hidden_activation or "gelu_pytorch_tanh",
        order="sandwich",
        attn_scale=c.query_pre_attn_scalar**-0.5,
        attn_softcap=c.maybe("attn_logit_softcapping") or 0.0,
        logit_softcap=c.maybe("final_logit_softcapping") or 0.0,
        **over,
    )


def gemma2(c: View) -> Arch:
    return _sandwich(c, kinds=every(2, c.num_hidden_layers))


def _local_rope(c: View, kind: str) -> Mapping[str, Any]:
    """Sliding layers have a separate rotary base and are never scaled."""
    if c.get("rope_parameters") or kind == FULL:
        return rope_parameters(c, kind)
    return {"rope_theta": c.rope_local_base_freq}


def gemma3(c: View) -> Arch:
    if c.get("use_bidirectional_attention"):
        c.refuse("use_bidirectional_attention", "it is an encoder")
    pattern = c.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _sandwich(c, kinds=every(pattern, c.num_hidden_layers), ropes=_local_rope, qk_norm="head")
