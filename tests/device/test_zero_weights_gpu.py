"""Zeros stay zeros on a GPU, through every kernel that rounds: engines with matrices, norms and layers of zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.loader.online import coder_of
from quire.ops.act import GATED
from quire.ops.coded import CodedWeight, coded_linear, quantize_rows
from quire.ops.few import NormRule, linear_act, linear_add, linear_parts, norm_linear
from quire.ops.op import Kernels
from quire.ops.rounded import RoundedRows, RowCode, add_norm_rounded, rounded_act, rounded_parts
from quire.quant.coded import CodedMatrix
from quire.quant.device_codes import device_codes
from tests.engine.test_zero_weights import check_all_zeros, check_zero_layer, zeroed

pytestmark = pytest.mark.gpu
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"quantization": "fp8"}, "int8": {"quantization": "int8_wo"},
    "int4": {"quantization": "int4_wo"},
    "fp8 and head": {"quantization": "fp8", "quantization_config": {"lm_head": "int8"}},
}  # fmt: skip
ROWS = (1, 2, 16, 33, 100, 160, 256, 300)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_models_with_zeros(arch: str, form: str, tmp_path: Path) -> None:
    """All zeros, a layer of zeros, and norms of zeros before matrices of numbers."""
    check_all_zeros(zeroed(arch, tmp_path / "all", ""), **FORMS[form])
    check_zero_layer(zeroed(arch, tmp_path / "layer", "model.layers.1."), **FORMS[form])
    check_zero_layer(zeroed(arch, tmp_path / "norm", "model.layers.1.post_attention_layernorm"), **FORMS[form])


def made(form: str, rows: int, width: int, *, zeros: bool) -> CodedWeight:
    numbers = torch.randn((rows, width), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    coder = coder_of(form)
    assert coder is not None
    found = coder((numbers * (0 if zeros else 1)).cuda())
    weight = device_codes(found) if isinstance(found, CodedMatrix) else found
    assert isinstance(weight, CodedWeight)
    return weight


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_products_with_zeros(form: str, rows: int) -> None:
    """Of rows of zeros, of a matrix of zeros, and behind a norm whose gains are zeros."""
    kernels = Kernels.here("cuda")
    act = kernels.of(GATED["silu"])
    draw = torch.Generator().manual_seed(rows)
    numbers = torch.randn((rows, 512), generator=draw).to("cuda", torch.bfloat16)
    gains = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    for x, gain, zeros in ((numbers * 0, gains, False), (numbers, gains, True), (numbers, gains * 0, False)):
        weight, rule = made(form, 1024, 512, zeros=zeros), NormRule(gain, 1e-6, 0.0, False)
        plain = x * gain  # what the norm leaves of zeros
        found = [kernels.of(coded_linear)(plain, weight)]
        if rows == 1:
            found += [kernels.of(norm_linear)(x, rule, weight, None, each) for each in (None, act)]
            found += [kernels.of(linear_add)(plain, weight, None, torch.zeros_like(found[0]))]
        if rows <= 32:
            found += [
                kernels.of(linear_parts)(plain, weight, None).whole(),
                kernels.of(linear_act)(plain, weight, None, act),
            ]
        if weight.rounds:
            code = RowCode.of(weight)
            rounded, _ = kernels.of(add_norm_rounded)(x.clone(), None, rule, code)
            parts = kernels.of(rounded_parts)(rounded, weight, None)
            found += [parts if isinstance(parts, torch.Tensor) else parts.whole()]
            after = kernels.of(rounded_act)(rounded, weight, None, act, code)
            assert isinstance(after, RoundedRows)
            found += [after.codes.float() * after.scale[0][:, None]]
        for each in found:  # one row of int4 is multiplied as 1024 + code: its rounding is left, times a scale of 1e-13
            assert each.float().abs().max().item() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("group", [128, 512])
def test_rows_of_zeros_are_rounded(group: int, dtype: torch.dtype) -> None:
    x = torch.randn((40, 512), generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    x[3], x[7, :128], x[9] = 0, 0, 1e-30
    codes, scale = Kernels.here("cuda").of(quantize_rows)(x, dtype, group)
    assert scale.isfinite().all() and (scale > 0).all()
    assert not codes.float()[3].any() and not codes.float()[7, :128].any() and codes.float().isfinite().all()
