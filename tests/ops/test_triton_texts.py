"""Attention within texts and sums of texts, interpreted on CPU, against their references (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from tests import text_cases as cases


@pytest.mark.parametrize(("window", "slopes"), [(0, False), (0, True), (3, False), (70, False)])
def test_attention(window, slopes):
    cases.check_attention("cpu", torch.float32, 4, 2, 24, window, slopes)


def test_attention_of_large_heads():
    cases.check_attention("cpu", torch.float32, 2, 1, 80)


def test_attention_of_16_bits():
    cases.check_attention("cpu", torch.float16, 2, 2, 64, tolerance=4e-3)


def test_a_text_alone():
    cases.check_alone("cpu", torch.float32)


def test_other_keys_than_queries():
    cases.check_cross("cpu", torch.float32)


@pytest.mark.parametrize("width", [32, 200])
def test_sums(width):
    cases.check_sums("cpu", torch.float32, width)
