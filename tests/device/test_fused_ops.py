"""Norms, activations, and what lies between the qkv product and attention, on CUDA, against their references."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fused_cases as cases

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 33, 1300])
@pytest.mark.parametrize("width", [64, 576, 1024, 2880, 4096, 16384])
def test_norms(width, tokens, dtype):
    cases.check_norms("cuda", dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(32, 128), (5, 64), (8, 256), (3, 80)])
def test_head_norm(heads, size, dtype):
    for tokens in (1, 77):
        cases.check_head_norm("cuda", dtype, tokens, heads, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (200, 12288), (33, 100)])
def test_gated_activations(rows, width, dtype):
    cases.check_acts("cuda", dtype, rows, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("qk_norm", ["", "head", "each"])
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 128, 128), (9, 3, 64, 64), (32, 2, 128, 64), (6, 1, 256, 256), (32, 32, 96, 96), (4, 4, 80, 0)],
)  # fmt: skip
def test_prepare_qkv(shape, qk_norm, pairs, dtype):
    for tokens in (1, 130):
        offset = 1.0 if qk_norm == "each" else 0.0
        cases.check_prepare("cuda", dtype, tokens, *shape, pairs=pairs, qk_norm=qk_norm, offset=offset)
