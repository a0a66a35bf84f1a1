"""Which matmuls of one row take which kernel on Hopper (ops/triton/few_forms.py)."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from quire.ops import few as few_ops
from quire.ops.coded import coded_linear
from quire.ops.op import FormTable, Kernels
from quire.ops.triton import few_blocks, few_coded, few_forms
from tests.coded_cases import Made, normal
from tests.coded_cases import weight_of as coded_weight
from tests.gguf_blocks import weight_of

BLOCKS, CODES = few_blocks.few_blocks_linear, few_coded.few_coded_linear


def test_kernels_by_matrix_and_input():
    x, blocks = normal(3, 512, dtype=torch.bfloat16), weight_of("Q4_K", 24, 512)
    one = x[:1]
    assert few_forms._kernel_of(one, blocks) is BLOCKS and few_forms._kernel_of(one.half(), blocks) is BLOCKS
    assert few_forms._kernel_of(one, coded_weight(Made("int4", 24, 512, 128))) is CODES
    assert few_forms._kernel_of(one, torch.empty(24, 512)) is None
    apart = normal(1, 520, dtype=torch.bfloat16)[:, 1:513]  # not at a multiple of 16 bytes
    for other in (x, one.float(), apart, x.t()[:1]):
        assert few_forms._kernel_of(other, blocks) is None
    cut = blocks._replace(codes=blocks.codes.transpose(0, 1).contiguous().transpose(0, 1))
    for weight in (cut, weight_of("IQ4_XS", 24, 512), weight_of("NVFP4", 24, 512), weight_of("Q8_0", 24, 384)):
        assert few_forms._kernel_of(one[:, : weight.width], weight) is None
        assert few_forms.few_rows(512, torch.bfloat16, [blocks, weight]) == 0
    assert few_forms.few_rows(512, torch.bfloat16, [blocks, torch.empty(8, 512)]) == 1
    assert few_forms.few_rows(512, torch.float32, [blocks]) == 0


def test_none_of_them_where_results_must_not_depend_on_the_batch():
    table = FormTable("cuda")
    few_forms.add_forms(table, {}, lambda kernels: not kernels.batch_invariant, early=False)
    kernels = Kernels(torch.device("cuda"), table)
    for op in (few_ops.few_rows, few_ops.norm_linear, few_ops.norm_linears, few_ops.linear_add, coded_linear):
        assert kernels.of(op) is not op.reference
        assert replace(kernels, batch_invariant=True).of(op) is op.reference


def test_one_row_of_blocks_by_itself_is_as_tall_as_it_likes(monkeypatch):
    """The output matrix, say; more rows go the other way."""
    monkeypatch.setattr(few_blocks, "few_blocks_linear", lambda x, weight, bias, *, early: ("blocks", early))
    linear = few_forms.TallLinear(lambda *given: "otherwise", None, early=True)
    x, weight = normal(2, 512, dtype=torch.bfloat16), weight_of("Q6_K", 24, 512)
    assert linear(x[:1], weight) == ("blocks", True) and linear(x, weight) == "otherwise"
    assert linear(x[:1], coded_weight(Made("int4", 24, 512, 128))) == "otherwise"
