"""Weights of 4 and 8 bits for the tests of kernels: of every kind, with sizes that fill no tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire.ops.act import GATED
from quire.ops.coded import CodedWeight, chunk_of, is_packed, pack_halves
from quire.ops.few import NormRule, linear_add, norm_linear, norm_linears
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows, RowCode


class Made(NamedTuple):
    """What a weight of a test is like."""

    kind: str
    rows: int
    width: int
    group: int
    zeros: bool = False
    rounds: bool = False
    between: bool = False  # zero points lie between codes


WEIGHTS = {
    "fp8-rows": Made("fp8", 96, 256, 256, rounds=True),
    "fp8-odd": Made("fp8", 50, 144, 144, rounds=True),
    "fp8-blocks": Made("fp8", 72, 384, 128, rounds=True),
    "fp8-32": Made("fp8", 40, 96, 32, rounds=True),
    "int8-rows": Made("int8", 50, 144, 144, rounds=True),
    "int8-64": Made("int8", 48, 192, 64),
    "int8-zeros": Made("int8", 33, 256, 128, zeros=True),
    "int4-32": Made("int4", 40, 96, 32),
    "int4-64": Made("int4", 33, 192, 64),
    "int4-128": Made("int4", 72, 256, 128),
    "int4-zeros": Made("int4", 50, 384, 128, zeros=True),
    "int4-64-zeros": Made("int4", 50, 384, 64, zeros=True),
    "int4-rows": Made("int4", 50, 160, 160),
    "int4-rows-zeros": Made("int4", 16, 192, 192, zeros=True),
    "int4-between": Made("int4", 50, 256, 64, zeros=True, between=True),
    "int4-rows-between": Made("int4", 16, 192, 192, zeros=True, between=True),
    "fp4-16": Made("fp4", 40, 96, 16),
    "fp4-32": Made("fp4", 40, 128, 32),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def weight_of(made: Made, device: str = "cpu", *, scale_dtype: torch.dtype = torch.float32) -> CodedWeight:
    draw = torch.Generator().manual_seed(made.rows + made.width)
    shape, groups = (made.rows, made.width), (made.width // made.group, made.rows)
    scale = (0.5 + torch.rand(groups, generator=draw)).mul(0.02).to(scale_dtype)
    zero = None
    if made.kind == "fp8":
        codes = (torch.randn(shape, generator=draw) * 3).to(torch.float8_e4m3fn)
    elif made.kind == "int8":
        codes = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
        zero = torch.randint(-100, 100, groups, generator=draw, dtype=torch.int16) if made.zeros else None
    else:
        assert is_packed(made.kind)
        whole = torch.randint(0, 16, shape, generator=draw, dtype=torch.uint8)
        codes = pack_halves(whole, chunk_of(made.width, made.group))
        zero = torch.randint(0, 16, groups, generator=draw, dtype=torch.uint8) if made.zeros else None
        if zero is not None and made.between:
            zero = zero + torch.rand(groups, generator=draw)
    moved = [None if t is None else t.to(device) for t in (codes, scale, zero)]
    assert moved[0] is not None and moved[1] is not None
    return CodedWeight(made.kind, moved[0], moved[1], moved[2], *shape, made.group, made.rounds)


def case(
    name: str, rows: int, device: str, dtype: torch.dtype, bias: bool = False
) -> tuple[Tensor, CodedWeight, Tensor | None]:
    weight = weight_of(WEIGHTS[name], device)
    x = normal(rows, weight.width, seed=rows, dtype=dtype, device=device)
    return x, weight, normal(weight.rows, seed=1, dtype=dtype, device=device) if bias else None


def check_few(name: str, rows: int, device: str, dtype: torch.dtype, *, early: bool = False) -> None:
    """Codes in the matmuls of ops/few.py, by the kernel that also reads plain matrices."""
    from quire.ops.triton import few  # these cases are read without Triton too

    weight = weight_of(WEIGHTS[name], device)
    check_few_forms(few, normal(rows, weight.width, seed=rows, dtype=dtype, device=device), weight, early=early)


def check_few_forms(forms: ModuleType, x: Tensor, weight: CodedWeight, *, early: bool = False) -> None:
    """Every use of these ops: norms before, an activation or an addition after the matmul; matrices side by side."""
    from quire.ops.triton import act  # as above

    rows, dtype, device = x.shape[0], x.dtype, str(x.device)
    gains = normal(weight.width, seed=1, dtype=dtype, device=device)
    bias, stream = (normal(n, weight.rows, seed=n, dtype=dtype, device=device) for n in (1, rows))
    bias, rule, wide = bias[0], NormRule(gains, 1e-6, 0.0, False), NormRule(gains, 1e-6, 1.0, True)
    silu, plain = act.gated_form(act.SILU), GATED["silu"].reference
    known = {"codes": {silu: act.SILU}, "early": early}
    both, parts = torch.cat((bias, -bias)), [weight, weight]
    check(forms.norm_linears(x, rule, parts, both, early=early), norm_linears(x, rule, parts, both), 1e-2)
    for right in (weight, *wrong_ones(weight)):
        is_right = right is weight
        for norm in (rule, wide):
            with nullcontext() if is_right else pytest.raises(AssertionError):
                check(forms.norm_linear(x, norm, right, bias, **known), norm_linear(x, norm, weight, bias), 1e-2)
        for added in (None, bias):
            with nullcontext() if is_right else pytest.raises(AssertionError):
                found = forms.linear_add(x, right, added, stream, early=early)
                check(found, linear_add(x, weight, added, stream), 1e-2)
        for given in (silu, plain):  # fused, and not
            with nullcontext() if is_right else pytest.raises(AssertionError):
                found = forms.norm_linear(x, rule, right, bias, given, **known)
                check(found, norm_linear(x, rule, weight, bias, plain), 1e-2)


def check_rounded(width: int, dtype: torch.dtype, code: RowCode, device: str, *, exact: bool) -> None:
    """Norms and activations that give codes: those of the same kernels followed by rounding in a pass of its own.
    `exact`: bit for bit, else as far as the interpreter divides and rounds as a GPU does."""
    from quire.ops.triton import act, coded, norm  # these cases are read without Triton too

    rows, group = 9, code.group or width
    x, delta, gains = (normal(n, width, seed=n + 1, dtype=dtype, device=device) for n in (rows, rows, 1))
    parts = PartialSums(normal(3, rows, width, seed=5, device=device), dtype)
    x[4], delta[4], parts.sums[:, 4] = 0, 0, 0
    for rule in (NormRule(gains[0], 1e-6, 0.0, False), NormRule(gains[0], 1e-6, 1.0, True)):
        for added in (None, delta, parts):
            found, total = coded.add_norm_rounded(x.clone(), added, rule, code)
            if rule.offset:
                plain, sums = norm.rms_norm_wide(x, gains[0], 1e-6, 1.0), x
                if added is not None:
                    plain, sums = norm.add_rms_norm_wide(x.clone(), added, gains[0], 1e-6, 1.0)
            else:
                plain, sums = norm.rms_norm(x, gains[0], 1e-6), x
                if added is not None:
                    plain, sums = norm.add_rms_norm(x.clone(), added, gains[0], 1e-6)
            assert torch.equal(total, sums)
            _check_codes(found, coded.quantize_rows(plain, code.dtype, group), exact)
    gate_up = normal(rows, 2 * width, seed=7, dtype=dtype, device=device)
    for number in (act.SILU, act.GELU_TANH):
        form = act.gated_form(number)
        found = coded.act_rounded(gate_up, form, code, acts={form: number})
        _check_codes(found, coded.quantize_rows(form(gate_up), code.dtype, group), exact)
        other = coded.act_rounded(gate_up, form, code, acts={})  # one that has no kernel
        _check_codes(other, coded.quantize_rows(form(gate_up), code.dtype, group), exact)


def _check_codes(found: RoundedRows, wanted: tuple[Tensor, Tensor], exact: bool) -> None:
    assert found.scale.shape == wanted[1].shape and found.codes.dtype is wanted[0].dtype
    if exact:
        assert torch.equal(found.codes.view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found.scale, wanted[1])
        return
    torch.testing.assert_close(found.scale, wanted[1])
    assert (found.codes.float() != wanted[0].float()).float().mean() < 0.01


def check(found: Tensor, wanted: Tensor, error: float = 4e-3) -> None:
    """Within the rounding of 16 bits, of every result to the largest."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    off = ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    assert off < error, off


def wrong_ones(weight: CodedWeight) -> Iterator[CodedWeight]:
    """One tensor of it changed at a time."""
    yield weight._replace(scale=weight.scale * 1.05)
    if len(weight.scale) > 1:
        yield weight._replace(scale=weight.scale.roll(1, 0))
    yield weight._replace(scale=weight.scale.roll(1, 1))
    yield weight._replace(codes=weight.codes.view(torch.uint8).roll(1, -1).view(weight.codes.dtype))
    if is_packed(weight.kind):
        yield weight._replace(codes=weight.codes >> 4 | weight.codes << 4)
    if weight.zero is not None:
        # One step of 8 bits is a 255th of the range, below the bounds of 16-bit kernels.
        yield weight._replace(zero=weight.zero + (8 if weight.kind == "int8" else 1))
        yield weight._replace(zero=None)
