"""Attaches the Triton forms to the ops, for CUDA. A worker on such a device calls `register` before it builds a model.

A form that takes only some shapes hands the others to the reference. Must not know layers or models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from quire.base import env
from quire.ops import act as act_ops
from quire.ops import moe as moe_ops
from quire.ops import norm as norm_ops
from quire.ops import qkv as qkv_ops
from quire.ops import rope as rope_ops
from quire.ops import sample as sample_ops
from quire.ops.triton import act, moe, norm, rope, rows, sample

_MOST_EXPERTS = 1024


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (norm if norm.fits(x, weight) else norm_ops).rms_norm(x, weight, eps)


def _rms_norm_wide(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return (norm if norm.fits(x, weight) else norm_ops).rms_norm_wide(x, weight, eps, offset)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    return (norm if norm.fits(x, weight) else norm_ops).layer_norm(x, weight, bias, eps, offset)


def _add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (norm if norm.fits(x, weight, delta) else norm_ops).add_rms_norm(x, delta, weight, eps)


def _add_rms_norm_wide(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return (norm if norm.fits(x, weight, delta) else norm_ops).add_rms_norm_wide(x, delta, weight, eps, offset)


def _route(logits: Tensor, top_k: int, **rule: Any) -> tuple[Tensor, Tensor]:
    if rule.get("groups", 1) > 1 or logits.shape[1] > _MOST_EXPERTS:
        return moe_ops.route.reference(logits, top_k, **rule)
    kept = {name: value for name, value in rule.items() if name in ("score", "renorm", "scale", "bias")}
    return moe.route(logits, top_k, **kept)


@cache  # once per process
def register() -> None:
    norm_ops.rms_norm.form("cuda")(_rms_norm)
    norm_ops.rms_norm_wide.form("cuda")(_rms_norm_wide)
    norm_ops.layer_norm.form("cuda")(_layer_norm)
    norm_ops.add_rms_norm.form("cuda")(_add_rms_norm)
    norm_ops.add_rms_norm_wide.form("cuda")(_add_rms_norm_wide)
    qkv_ops.prepare_qkv.form("cuda")(rope.prepare_qkv)
    rope_ops.rope_tables.form("cuda")(rope.rope_tables)
    codes: dict[Callable, int] = {act.clamped_swiglu: act.CLAMPED}
    for name, code in act.CODES.items():
        codes[act_ops.gated_of(name).form("cuda")(act.gated_form(code))] = code
    act_ops.clamped_swiglu.form("cuda")(act.clamped_swiglu)
    moe_ops.route.form("cuda")(_route)
    fixed = env.BATCH_INVARIANT.get()
    moe_ops.run_experts.form("cuda")(partial(moe.run_experts, codes=codes, fixed=fixed))
    sample_ops.sample_rows.form("cuda")(sample.sample_rows)
    rows.register()
