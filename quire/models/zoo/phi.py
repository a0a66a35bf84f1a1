"""Phi 1 to 4: parallel blocks with layer norm first, then Llama-like blocks stored fused."""

from __future__ import annotations

from dataclasses import replace

from quire.models.arch import Arch, with_window
from quire.models.view import View, read

_PHI_NAMES = (
    (r"\.dense\.", ".o_proj."),
    (r"\.fc1\.", ".up_proj."),
    (r"\.fc2\.", ".down_proj."),
    (r"\.(q|k)_layernorm\.", r".\1_norm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)


def phi(c: View) -> Arch:
    arch = read(
        c, order="parallel", one_norm=True, gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True,
        names=_PHI_NAMES, qk_norm="head" if c.qk_layernorm else "", qk_norm_bias=True,
    )  # fmt: skip
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True))


def phi3(c: View) -> Arch:
    arch = read(c, qkv_bias=False, o_bias=False)
    rope = arch.layers[0].rope
    if rope is not None and rope.scaling is not None and rope.scaling["rope_type"] == "yarn":
        longrope = replace(rope, scaling={**rope.scaling, "rope_type": "longrope"})  # early releases say yarn
        arch = replace(arch, layers=tuple(replace(layer, rope=longrope) for layer in arch.layers))
    return with_window(arch, c.maybe("sliding_window"))
