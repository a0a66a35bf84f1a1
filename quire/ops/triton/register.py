"""The Triton forms of ops as a table, for CUDA: `compiled` makes it, `Kernels` picks a model's forms from it.

A form that supports only some shapes passes others to the reference. Also installs the fast launcher of every kernel
(launch.py), and records which kernels a function would launch. Must not know layers or models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quire.base import env
from quire.base.log import logger
from quire.ops import act as act_ops
from quire.ops import coded_experts as coded_ops
from quire.ops import few as few_ops
from quire.ops import linear as linear_ops
from quire.ops import moe as moe_ops
from quire.ops import norm as norm_ops
from quire.ops import qkv as qkv_ops
from quire.ops import rope as rope_ops
from quire.ops import sample as sample_ops
from quire.ops import ssm as ssm_ops
from quire.ops.op import FormTable, Kernels, same_bits
from quire.ops.parts import PartialSums
from quire.ops.triton import (
    act,
    attention,
    attention_cache,
    attention_plan,
    coded,
    few,
    fixed_linear,
    launch,
    lora,
    mask,
    moe,
    moe_coded,
    norm,
    parts,
    rope,
    rows,
    sample,
    ssm,
    ssm_chunk,
    texts,
    warm,
)

_MOST_EXPERTS = 1024
_log = logger(__name__)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, early: bool) -> Tensor:
    if norm.fits(x, weight):
        return norm.rms_norm(x, weight, eps, early=early)
    return norm_ops.rms_norm.reference(x, weight, eps)


def _rms_norm_wide(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool) -> Tensor:
    if norm.fits(x, weight):
        return norm.rms_norm_wide(x, weight, eps, offset, early=early)
    return norm_ops.rms_norm_wide.reference(x, weight, eps, offset)


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, *, early: bool
) -> Tensor:
    if norm.fits(x, weight):
        return norm.layer_norm(x, weight, bias, eps, offset, early=early)
    return norm_ops.layer_norm.reference(x, weight, bias, eps, offset)


def _add_layer_norm(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float = 0.0, *, early: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if norm.fits(x, weight, delta):
        return norm.add_layer_norm(x, delta, weight, bias, eps, offset, early=early)
    return norm_ops.add_layer_norm.reference(x, delta, weight, bias, eps, offset)


def _add_rms_norm(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float, *, early: bool
) -> tuple[Tensor, Tensor]:
    if norm.fits(x, weight, delta):
        return norm.add_rms_norm(x, delta, weight, eps, early=early)
    return norm_ops.add_rms_norm.reference(x, delta, weight, eps)


def _add_rms_norm_wide(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool
) -> tuple[Tensor, Tensor]:
    if norm.fits(x, weight, delta):
        return norm.add_rms_norm_wide(x, delta, weight, eps, offset, early=early)
    return norm_ops.add_rms_norm_wide.reference(x, delta, weight, eps, offset)


def _turn_heads_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    form = rope.turn_heads_ if rope.turns(x) else rope_ops.turn_heads_.reference
    form(x, cos, sin)


def _route(logits: Tensor, top_k: int, *, early: bool = False, **rule: Any) -> tuple[Tensor, Tensor]:
    rare = rule.get("score") in ("topk_sigmoid", "mixer")
    if rare or rule.get("groups", 1) > 1 or logits.shape[1] > _MOST_EXPERTS:
        return moe_ops.route.reference(logits, top_k, **rule)
    supported = {name: value for name, value in rule.items() if name in ("score", "renorm", "scale", "bias", "dtype")}
    return moe.route(logits, top_k, **supported, early=early)


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, work: Any, act: str, *, fixed: bool
) -> Tensor:
    fits = ssm.conv_fits(x, weight, act)
    if not fits:
        return ssm_ops.causal_conv.reference(x, weight, bias, states, work, act)
    return ssm.causal_conv(x, weight, bias, states, work, act, fixed=fixed)


def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, norm_first: bool) -> Tensor:
    form = ssm.gated_rms_norm if ssm.norm_fits(x, gate, group) else ssm_ops.gated_rms_norm.reference
    return form(x, gate, weight, eps, group, norm_first)


def _add_states(table: FormTable) -> None:
    for fixed, fits in ((False, _free), (True, same_bits)):
        table.form(ssm_ops.causal_conv, fits)(partial(_causal_conv, fixed=fixed))
        table.form(ssm_ops.ssd_scan, fits)(partial(ssm_chunk.ssd_scan, fixed=fixed))
        table.form(ssm_ops.delta_scan, fits)(partial(ssm_chunk.delta_scan, fixed=fixed))
        table.form(ssm_ops.selective_scan, fits)(partial(ssm.selective_scan, fixed=fixed))
    table.form(ssm_ops.gated_rms_norm)(_gated_rms_norm)
    table.form(ssm_ops.state_places)(ssm.state_places)


def _add_few(table: FormTable, codes: dict[Callable, int], early: bool) -> None:
    """Forms for a few rows; not used if results must not depend on the number of rows."""
    table.form(few_ops.few_rows, _free)(few.few_rows)
    table.form(few_ops.norm_linear, _free)(partial(few.norm_linear, codes=codes, early=early))
    table.form(few_ops.norm_linears, _free)(partial(few.norm_linears, early=early))
    table.form(few_ops.linear_add, _free)(partial(few.linear_add, early=early))
    table.form(few_ops.norm_router, _free)(partial(few.norm_router, early=early))
    table.form(few_ops.sum_parts)(partial(parts.sum_parts, early=early))
    table.form(linear_ops.linear, _free)(partial(few.linear, early=early))


def _add_skinny(table: FormTable, codes: dict[Callable, int], early: bool) -> None:
    """Matmuls that are only faster with Hopper's instructions, written in an experimental part of Triton."""
    try:
        from quire.ops.triton import few_forms, moe_mx, skinny  # lazy
    except ImportError as wrong:
        _log.warning("decodes of 3 to 64 rows, of codes, and experts in MXFP4 use slower matmuls: %s", wrong)
        return
    skinny.add_forms(table, codes, _free, early=early)
    few_forms.add_forms(table, codes, _free, early=early)
    moe_mx.add_forms(table, codes, _free, early=early)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _add_fixed(table: FormTable, codes: dict[Callable, int], early: bool) -> None:
    """Replacements of forms and libraries whose order of summation depends on the number of rows."""
    table.form(linear_ops.linear, same_bits)(fixed_linear.FixedLinear())
    table.form(linear_ops.heads_matmul, same_bits)(fixed_linear.heads_matmul)
    experts = partial(moe.run_experts, codes=codes, fixed=True, early=early)
    table.form(moe_ops.run_experts, same_bits)(experts)
    coded = partial(moe_coded.run_experts, codes=codes, fixed=True, early=early)
    table.form(coded_ops.run_coded_experts, same_bits)(coded)


def _coded_forms() -> frozenset[str]:
    """Triton converts e4m3 from Ada on; the others would run before, but nobody has tried."""
    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return frozenset(coded_ops.FORMS if has_fp8 else ())


def _free(kernels: Kernels) -> bool:
    return not kernels.batch_invariant


def compiled() -> tuple[FormTable, None]:
    return _table(), None


@cache
def _table() -> FormTable:
    table = FormTable("cuda")
    early = env.EARLY_LAUNCH.get()
    table.form(norm_ops.rms_norm)(partial(_rms_norm, early=early))
    table.form(norm_ops.rms_norm_wide)(partial(_rms_norm_wide, early=early))
    table.form(norm_ops.layer_norm)(partial(_layer_norm, early=early))
    table.form(norm_ops.add_layer_norm)(partial(_add_layer_norm, early=early))
    table.form(norm_ops.add_rms_norm)(partial(_add_rms_norm, early=early))
    table.form(norm_ops.add_rms_norm_wide)(partial(_add_rms_norm_wide, early=early))
    table.form(qkv_ops.prepare_qkv)(partial(rope.prepare_qkv, early=early))
    table.form(rope_ops.rope_tables)(rope.rope_tables)
    table.form(rope_ops.turn_heads_)(_turn_heads_)
    codes: dict[Callable, int] = {act.clamped_swiglu: act.CLAMPED}
    for name, code in act.CODES.items():
        codes[table.form(act_ops.gated_of(name))(act.gated_form(code, early))] = code
    table.form(act_ops.clamped_swiglu)(act.clamped_swiglu)
    table.form(moe_ops.route)(partial(_route, early=early))
    table.form(moe_ops.run_experts)(partial(moe.run_experts, codes=codes, early=early))
    table.form(coded_ops.run_coded_experts)(partial(moe_coded.run_experts, codes=codes, early=early))
    table.form(coded_ops.coded_forms)(_coded_forms)
    _add_few(table, codes, early)
    coded.add_forms(table, codes, _free, early=early)
    if _is_hopper():
        _add_skinny(table, codes, early)
    _add_fixed(table, codes, early)
    table.form(sample_ops.sample_rows)(sample.sample_rows)
    rows.add_forms(table)
    texts.add_forms(table)
    mask.add_forms(table)
    lora.add_forms(table, _free, early=early)
    _add_states(table)
    if torch.cuda.is_available():
        launchers()
    return table


def launchers() -> list[launch.Launcher]:
    """Launchers of all of Quire's kernels loaded so far."""
    package = __name__.rpartition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.")]
    return launch.install([attention, attention_cache, attention_plan, *modules], launch.current_stream())


def record(run: Callable[[], None], tell: Callable[[dict[str, Any]], None] | None = None) -> list[dict[str, Any]]:
    """What `run` would launch, as jobs for compile_child.py; `tell` is called with each at once. Nothing is
    launched, so its results are meaningless."""
    note = warm.Recorder(launch.arch(), tell)
    with launch.recorded(launchers(), note):
        run()
    # The longest first, to shorten the tail of a later start.
    return sorted(note.jobs.values(), key=lambda job: -len(job["constant_keys"]))
