"""A block's way for a few rows gives what its usual way gives: the same bits with the references of its ops."""

from itertools import pairwise

import pytest
import torch

from quire.layers.batch import Batch, NoAttention
from quire.loader.dummy import fill_dummy
from quire.loader.online import coder_of
from quire.models.blocks import Few, InParts
from quire.models.build import build_model
from quire.ops.coded import CodedWeight, coded_linear, decode_weight, quantize_rows
from quire.ops.few import NormRule, few_rows, linear_add, norm_linear, norm_linears, part_rows
from quire.ops.op import Kernels
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows, rounded_linear, rounded_parts, rounded_rows
from quire.quant.arena import Arena
from quire.quant.coded_scheme import CodedChoice, CodedScheme
from quire.quant.scheme import Storage
from tests.replaced_form import replaced
from tests.tiny_models import tiny_config

TOKENS = 3


@pytest.fixture
def preferred():
    """This device would rather have fused products for up to three rows."""
    with replaced(few_rows, "cpu", lambda width, dtype, matrices: TOKENS):
        yield


def built(name, **overrides):
    config = tiny_config(name, **overrides).to_dict() | {"architectures": [name]}
    model = build_model(config, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2)
    return model


class Echo(NoAttention):
    """Attends to the token itself: its value."""

    def run(self, q, k, v, cache, **rest):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def forward(model, tokens):
    ids = torch.arange(tokens) + 5
    with torch.inference_mode():
        return model.forward(Batch(ids, torch.arange(tokens), [Echo()], ids, tokens))


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"]
)
def test_both_ways_agree(name, preferred):
    model = built(name)
    assert all(block.few is not None and block.few.rows == TOKENS for block in model.layers)
    found = forward(model, TOKENS)
    for block in model.layers:
        block.few = None
    wanted = forward(model, TOKENS)
    assert found.abs().sum() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_more_rows_go_the_usual_way(preferred):
    model = built("LlamaForCausalLM")

    class Never:
        rows = TOKENS

        def __call__(self, *args):
            raise AssertionError("too many rows for this way")

    for block in model.layers:
        block.few = Never()
    forward(model, TOKENS + 1)
    with pytest.raises(AssertionError):
        forward(model, TOKENS)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Olmo2ForCausalLM", "CohereForCausalLM", "GraniteForCausalLM"])
def test_blocks_of_other_shapes_have_no_such_way(name, preferred):
    assert all(block.few is None for block in built(name).layers)


def test_a_device_that_prefers_nothing_has_no_such_way():
    assert all(block.few is None for block in built("LlamaForCausalLM").layers)


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_codes_are_read_where_the_device_reads_them(name, form, monkeypatch):
    """By the way for a few rows up to as many as `few_rows` says, then in parts up to `part_rows`, then by none."""
    seen, most = [], {}

    def answer(op):
        def rows(width, dtype, matrices):
            seen.append([type(matrix) for matrix in matrices])
            return most[op] if matrices else TOKENS  # without matrices: whether the device has such ops

        return rows

    calls = []
    for way, kind in (("join", Few), ("in_parts", InParts)):
        run = kind.__call__
        counted = lambda self, *rest, way=way, run=run: calls.append(way) or run(self, *rest)  # noqa: E731
        monkeypatch.setattr(kind, "__call__", counted)
    with replaced(few_rows, "cpu", answer("few")), replaced(part_rows, "cpu", answer("parts")):
        for few, parts in ((TOKENS, 2 * TOKENS), (TOKENS, 0), (0, 2 * TOKENS), (0, 0)):
            most |= {"few": few, "parts": parts}
            model = coded(name, form)
            found = {rows: forward(model, rows) for rows in (TOKENS, 2 * TOKENS, 2 * TOKENS + 1)}
            ways = ["join" if few else "in_parts" if parts else "", "in_parts" if parts else "", ""]
            assert calls == [way for way in ways for _ in model.layers if way]
            calls.clear()
            for block in model.layers:
                block.few = None
            for rows, result in found.items():
                wanted = forward(model, rows)
                assert wanted.abs().sum() > 0
                torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    read = [kinds for kinds in seen if kinds]
    assert read and all(kinds == [CodedWeight] * (2 if "Moe" in name else 4) for kinds in read)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_output_of_attention_knows_what_the_next_matmul_reads(name):
    """The matrix behind it, if that is one of these ops' own; nothing is known at the end of a block."""
    calls = []

    def noted(op):
        def run(*args):
            parts = args[2] if op is norm_linears else args[:4]
            (matrix,) = (part for part in parts if isinstance(part, CodedWeight))
            calls.append((op, matrix, args[4] if op is linear_add and len(args) > 4 else None))
            return op.reference(*args)

        return run

    with (
        replaced(few_rows, "cpu", lambda width, dtype, matrices: TOKENS),
        replaced(norm_linear, "cpu", noted(norm_linear)),
        replaced(norm_linears, "cpu", noted(norm_linears)),
        replaced(linear_add, "cpu", noted(linear_add)),
    ):
        model = coded(name, "fp8")
        forward(model, TOKENS)
    is_mixture = "Moe" in name
    assert len(calls) == (2 if is_mixture else 4) * len(model.layers)
    told = [following is not None for _, _, following in calls]
    assert told == [not is_mixture and place % 4 == 1 for place in range(len(calls))]
    for (_, _, following), (_, matrix, _) in pairwise(calls):
        assert following is None or following.codes is matrix.codes


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_matrices_one_below_another_are_multiplied_as_one(count, wide):
    """Of numbers and of codes, with their biases in one."""
    weights = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (24, 8, 16)[:count]]
    codes, scale = quantize_rows(weights[0], torch.int8, 64)
    coded = CodedWeight("int8", codes, scale, None, 24, 64, 64)
    numbers = torch.cat([decode_weight(coded, torch.float32), *weights[1:]])
    x, gains = torch.randn(2, 64), 1 + 0.1 * torch.randn(64)
    rule = NormRule(gains, 1e-6, 1.0 if wide else 0.0, wide)
    for bias in (torch.randn(len(numbers)), None):
        found = norm_linears(x, rule, [coded, *weights[1:]], bias)
        torch.testing.assert_close(found, norm_linear(x, rule, numbers, bias), rtol=1e-5, atol=1e-5)


def in_two_parts(x, weight, bias):
    product = rounded_linear.reference(x, weight, bias)
    return PartialSums(torch.stack((0.25 * product, 0.75 * product)), x.dtype)


@pytest.mark.parametrize("parts", [rounded_parts.reference, in_two_parts], ids=["whole", "parts"])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_inputs_are_rounded_where_they_are_made(name, form, parts):
    """From as many rows on as the device says, as rounding before every matmul does; of codes that round. Consumers
    add up the parts of a matmul."""

    def separately(x, weight, bias=None):
        if len(x) <= TOKENS or not weight.rounds:
            return coded_linear.reference(x, weight, bias)
        codes = RoundedRows(*quantize_rows.reference(x, weight.codes.dtype, weight.width), x.dtype)
        return rounded_linear.reference(codes, weight, bias)

    seen = []

    def least(matrices):
        seen.append(len(matrices))
        return TOKENS + 1 if all(matrix.rounds for matrix in matrices) else 0

    with (
        replaced(few_rows, "cpu", lambda width, dtype, matrices: 0 if matrices else 1),
        replaced(rounded_rows, "cpu", least),
        replaced(rounded_parts, "cpu", parts),
        replaced(coded_linear, "cpu", separately),
    ):
        model = coded(name, form, bias=True)
        found = {rows: forward(model, rows) for rows in (TOKENS, TOKENS + 1, 4 * TOKENS)}
        assert seen == [4] * len(model.layers)
        for block in model.layers:
            assert (block.rounding.rows > 0) == (form == "fp8")
            block.few = None
        for rows, result in found.items():
            torch.testing.assert_close(result, forward(model, rows), rtol=1e-5, atol=1e-5)
    if form == "fp8":
        exact = coded(name, form, bias=True)
        assert not torch.allclose(found[4 * TOKENS], forward(exact, 4 * TOKENS), rtol=1e-4, atol=1e-4)


def coded(name, form, bias=False):
    config = tiny_config(name).to_dict() | {"architectures": [name]}
    arena, kernels = Arena(torch.device("cpu")), Kernels(torch.device("cpu"))
    matrices = CodedScheme(torch.float32, arena, kernels, coder_of(form))
    storage = Storage(torch.float32, arena, kernels, CodedChoice(torch.float32, arena, kernels, matrices))
    model = build_model(config, dtype=torch.float32, storage=storage)
    fill_dummy(model, 0)
    model.finish_weights()
    if bias:
        for parameter in (p for n, p in model.named_parameters() if n.endswith("bias")):
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model
