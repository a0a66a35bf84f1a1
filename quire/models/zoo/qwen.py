"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from quire.layers.moe import MoeKind
from quire.models.arch import Arch, each, with_window
from quire.models.view import FULL, SLIDING, View, read


def _late_windows(c: View) -> list[str]:
    """Layers from max_window_layers on have a window, if the config enables it."""
    slides = c.use_sliding_window and c.maybe("sliding_window")
    return [SLIDING if slides and i >= c.max_window_layers else FULL for i in range(c.num_hidden_layers)]


def qwen2(c: View) -> Arch:
    """MiMo has modules for multi-token prediction beside it, which are drafters."""
    return read(c, kinds=_late_windows(c), qkv_bias=True, o_bias=False, ignore=(r"^model\.mtp_layers\.",))


def qwen3(c: View) -> Arch:
    return read(c, kinds=_late_windows(c), qk_norm="head")


def _sparse(c: View, arch: Arch) -> Arch:
    """Every decoder_sparse_step-th layer has experts, except those listed as dense."""
    dense, step = c.get("mlp_only_layers", default=[]), c.decoder_sparse_step
    return each(arch, lambda i, layer: {"moe": i not in dense and (i + 1) % step == 0})


def _experts(c: View, **over: Any) -> MoeKind:
    count = c.get("num_experts", "num_local_experts")
    return MoeKind(
        count, c.num_experts_per_tok, c.moe_intermediate_size, renorm=c.norm_topk_prob, round_weights=True, **over
    )


def qwen2_moe(c: View) -> Arch:
    slides = c.use_sliding_window and c.maybe("sliding_window")
    early = [SLIDING if slides and not i % 2 and i < c.max_window_layers else FULL for i in range(c.num_hidden_layers)]
    moe = _experts(c, shared_ffn=c.shared_expert_intermediate_size, shared_gate=True)
    return _sparse(c, read(c, kinds=early, qkv_bias=c.qkv_bias, o_bias=False, moe=moe))


def qwen3_moe(c: View) -> Arch:
    arch = read(c, qk_norm="head", moe=_experts(c))
    return _sparse(c, with_window(arch, c.maybe("sliding_window") if c.use_sliding_window else None))
