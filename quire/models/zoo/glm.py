"""GLM 4 and 4.5: rotary pairs over half a head, fused gate and up; sandwich norms in GLM-4-0414, experts in 4.5."""

from __future__ import annotations

from typing import Any

from quire.models.arch import Arch, with_rope
from quire.models.view import View, read
from quire.models.zoo.deepseek import grouped_experts


def glm(c: View, **over: Any) -> Arch:
    return with_rope(read(c, o_bias=False, **over), pairs=True)


def glm4(c: View) -> Arch:
    names = (
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )
    return glm(c, order="sandwich", names=names)


def glm4_moe(c: View) -> Arch:
    return grouped_experts(c, read(c, o_bias=False, qk_norm="head" if c.use_qk_norm else ""))
