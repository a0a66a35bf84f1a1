"""Cohere Command: parallel blocks under one layer norm, rotary pairs, scaled logits; windows from Command R7B on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.arch import Arch, each, with_rope
from quire.models.view import View, every, read


def cohere_block(c: View, **over: Any) -> Arch:
    arch = read(c, order="parallel", one_norm=True, logit_scale=c.logit_scale, **over)
    return with_rope(replace(arch, norm=replace(arch.norm, kind="layer")), pairs=True, wide=True)


def cohere(c: View) -> Arch:
    return cohere_block(c, qk_norm="each" if c.use_qk_norm else "")


def cohere2(c: View) -> Arch:
    kinds = every(c.get("sliding_window_pattern", default=4), c.num_hidden_layers)
    arch = cohere_block(c, kinds=kinds, head_dim=c.hidden_size // c.num_attention_heads)
    return each(arch, lambda i, layer: {} if layer.window else {"rope": None})
