"""Norms, activations and rotary positions against formulas written out another way, and against transformers."""

import math

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_pairs
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from quire.ops import act, norm, rope
from quire.ops.op import Kernels, op

HERE = Kernels.here("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (7, 48), (3, 5, 16)]


def draw(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def same(a, b, dtype):
    assert a.dtype is b.dtype is dtype
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6) if dtype is torch.float32 else torch.testing.assert_close(
        a, b, rtol=1e-2, atol=1e-2
    )


@pytest.fixture(autouse=True)
def _torch_only(monkeypatch):
    """Bits are compared here; the compiled forms, which another test may have attached, have tests of their own."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_norms_are_those_of_transformers(shape, dtype, device):
    """None: the reference; cpu: what layers get there."""
    choose = (lambda o: o.reference) if device is None else (lambda o: o.on(device))
    width = shape[-1]
    x, w, b = draw(shape, dtype), draw(width, dtype, 1), draw(width, dtype, 2)

    def theirs(module, bias=False):
        module.weight.data = w
        if bias:
            module.bias.data = b
        with torch.no_grad():
            return module(x)

    assert torch.equal(choose(norm.rms_norm)(x, w, 1e-5), theirs(LlamaRMSNorm(width, 1e-5)))
    assert torch.equal(choose(norm.rms_norm_wide)(x, w, 1e-5), theirs(Olmo2RMSNorm(width, 1e-5)))
    same(choose(norm.rms_norm_wide)(x, w, 1e-5, 1.0), theirs(GemmaRMSNorm(width, 1e-5)), dtype)
    layer = choose(norm.layer_norm)
    same(layer(x, w, None, 1e-5), theirs(CohereLayerNorm(width, 1e-5)), dtype)
    same(layer(x, w, b, 1e-5), theirs(torch.nn.LayerNorm(width, 1e-5), bias=True), dtype)
    same(layer(x, w, b, 1e-5, 1.0), theirs(NemotronLayerNorm1P(width, 1e-5), bias=True), dtype)
    same(layer(x, None, None, 1e-5), torch.nn.functional.layer_norm(x.float(), (width,)).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_with_a_weight_per_head(dtype):
    x, w = draw((5, 4, 16), dtype), draw((4, 16), dtype, 1)
    each = torch.stack([norm.layer_norm.reference(x[:, h], w[h], None, 1e-5) for h in range(4)], 1)
    for form in (norm.layer_norm.reference, norm.layer_norm.on("cpu")):
        same(form(x, w, None, 1e-5), each, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_add_then_norm(dtype):
    x, delta, w = (draw((6, 32), dtype, i) if i < 2 else draw(32, dtype, i) for i in range(3))
    for form in (norm.add_rms_norm.reference, norm.add_rms_norm.on("cpu")):
        normed, total = form(x, delta, w, 1e-6)
        assert torch.equal(total, x + delta) and torch.equal(normed, norm.rms_norm.reference(x + delta, w, 1e-6))


@pytest.mark.parametrize("name", act.PLAIN)
def test_activations(name):
    x = draw((9, 24), torch.float32)
    if name in ACT2FN:
        torch.testing.assert_close(act.plain_on(name, HERE)(x), ACT2FN[name](x), rtol=1e-4, atol=1e-4)
    gate, up = x[:, :12], x[:, 12:]
    torch.testing.assert_close(act.gated_on(name, HERE)(x), act.plain_on(name, HERE)(gate) * up)


def test_clamped_swiglu_by_hand():
    gate, up = [-9.0, 0.5, 8.0], [9.0, -0.25, -9.0]
    want = [
        (min(max(u, -2), 2) + 1) * min(g, 2) / (1 + math.exp(-1.5 * min(g, 2))) for g, u in zip(gate, up, strict=True)
    ]
    found = act.clamped_swiglu(torch.tensor([gate + up]), 1.5, 2.0)
    torch.testing.assert_close(found, torch.tensor([want]))


SCALINGS = [
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="dynamic", factor=3.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=64),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=8.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5),
    dict(rope_type="longrope", original_max_position_embeddings=64, short_factor=[1.0 + i for i in range(8)],
         long_factor=[3.0 + i for i in range(8)]),
    dict(rope_type="longrope", factor=2.0, original_max_position_embeddings=64, short_factor=[1.5] * 8,
         long_factor=[2.5] * 8),
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("length", [32, 64, 65, 200])
def test_frequencies_are_those_of_transformers(scaling, length):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=dict(scaling, rope_theta=900.0),
    )
    want, gain = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
    found, our_gain = rope.frequencies(900.0, 16, dict(scaling, max_position_embeddings=128), length)
    assert torch.equal(found, want) and our_gain == pytest.approx(gain)


def test_default_frequencies():
    found, gain = rope.frequencies(10000.0, 8, None, 99)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert gain == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 8])
@pytest.mark.parametrize("pairs", [False, True])
def test_rotation_is_that_of_transformers(dtype, dim, pairs):
    x = draw((6, 3, 16), dtype)
    positions, (inv, _) = torch.tensor([0, 1, 5, 9, 100, 2000]), rope.frequencies(100.0, dim, None, 0)
    cos, sin = rope.rope_tables(positions, inv, 1.0, pairs, dtype)
    angle = positions[:, None].float() * inv
    both = torch.cat((angle, angle), -1)
    hf_cos, hf_sin = both.cos().to(dtype)[None], both.sin().to(dtype)[None]
    q = x.transpose(0, 1)[None]
    if pairs:
        want = turn_pairs(q, q, hf_cos, hf_sin)[0]
    else:
        want = torch.cat((turn_halves(q[..., :dim], q[..., :dim], hf_cos, hf_sin)[0], q[..., dim:]), -1)
    assert torch.equal(rope.rotate(x, cos, sin, pairs), want[0].transpose(0, 1))


@pytest.mark.parametrize("pairs", [False, True])
def test_rotation_keeps_length_and_depends_on_distance(pairs):
    q, k = draw((1, 1, 16), torch.float32), draw((1, 1, 16), torch.float32, 1)
    inv, _ = rope.frequencies(50.0, 16, None, 0)

    def at(x, position):
        return rope.rotate(x, *rope.rope_tables(torch.tensor([position]), inv, 1.0, pairs, torch.float32), pairs)

    assert at(q, 77).norm() == pytest.approx(q.norm().item(), rel=1e-5)
    near, far = (at(q, 9) * at(k, 4)).sum(), (at(q, 109) * at(k, 104)).sum()
    assert near.item() == pytest.approx(far.item(), rel=1e-3)
    assert abs((at(q, 9) * at(k, 5)).sum() - near) > 1e-3


@pytest.mark.parametrize("dim", [64, 20, 10])
def test_tables_of_a_position_do_not_depend_on_others(dim):
    inv, _ = rope.frequencies(10000.0, dim, None, 0)
    positions, tables = torch.arange(700, 1760), rope.rope_tables.on("cpu")
    alone = [tables(position[None], inv, 1.5, False, torch.float32) for position in positions]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together = tables(positions, inv, 1.5, False, torch.float32)
            for found, wanted in zip(together, zip(*alone, strict=True), strict=True):
                assert torch.equal(found, torch.cat(wanted))
    finally:
        torch.set_num_threads(before)
    for found, wanted in zip(together, rope.rope_tables(positions, inv, 1.5, False, torch.float32), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_op_prefers_the_last_form_that_fits():
    @op
    def double(x):
        return x * 2

    assert double(3) == 6 and double.on("cpu")(3) == 6
    double.form("cpu")(lambda x: ("first", x))
    double.form("cpu", fits=lambda kernels: False)(lambda x: ("unfit", x))
    double.form("cuda")(lambda x: ("cuda", x))
    assert double.on("cpu")(3) == ("first", 3) and double(3) == 6
