"""Kernels of mixtures whose experts ranks divide, interpreted on CPU (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops import act as act_ops
from quire.ops.triton import moe, moe_bytes, moe_coded, moe_mx
from quire.ops.triton.moe_bytes import BytesConfig
from quire.ops.triton.moe_coded import CodedTileConfig
from quire.ops.triton.moe_coded_few import CodedFewConfig
from quire.ops.triton.moe_many import MoeManyConfig
from tests import expert_rank_cases as cases
from tests.coded_expert_cases import make_codes
from tests.fused_cases import Draw

TILES = (moe.MoeTileConfig(16, 64, 32, 4, 2), moe.MoeTileConfig(16, 64, 64, 4, 2))
MANY = tuple(MoeManyConfig(16, 64, 16, 4, 2, 8, resident, resident) for resident in (False, True))
CODED = (CodedTileConfig(16, 64, 128, 4, 2), CodedTileConfig(16, 64, 128, 4, 2))
FEW = CodedFewConfig((64, 128, 4), (64, 128, 4))
KINDS = ("fp8-rows", "fp8-blocks", "mxfp4", "int4-64-zeros")


@pytest.mark.parametrize("own", [*cases.RANKS, tuple(range(cases.EXPERTS))])
@pytest.mark.parametrize(
    ("tokens", "config"),
    [(2, None), (21, None), (21, moe.SortConfig(16, 16, 16, 4)), (21, moe.SortConfig(32, 16, 32, 4))],
)
def test_sorting(tokens, config, own):
    cases.check_sort("cpu", tokens, 3, 16, own, config)


def test_sorting_where_nothing_is_here():
    index = torch.full((21, 2), -1, dtype=torch.int32)
    for config in (None, moe.SortConfig(16, 16, 16, 4)):
        tiles = moe.sort_pairs(index, 2, 16, share=True, config=config)
        assert set(tiles.expert.tolist()) == {-1} and tiles.end.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 3), (2, 3)])
def test_a_few_tokens(tokens, top_k):
    cases.check_plain("cpu", torch.float32, tokens, top_k, 16, 12, 1e-5, bias=True)


@pytest.mark.parametrize("tokens", [1, 9])
def test_grouped(tokens):
    cases.check_plain("cpu", torch.float32, tokens, 2, 48, 40, 1e-5, bias=True, configs=TILES)


def test_grouped_by_descriptors():
    cases.check_plain("cpu", torch.float16, 9, 2, 32, 64, 2e-3, configs=MANY)


def test_an_activation_between_the_matmuls():
    gelu = act_ops.GATED["gelu"].reference
    for configs in (None, TILES):
        cases.check_plain("cpu", torch.float32, 2, 2, 16, 12, 1e-5, act=gelu, configs=configs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_of_codes(kind):
    cases.check_coded("cpu", torch.float32, kind, 2, 3, 128, 64, 1e-5, few=FEW)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_codes(kind):
    cases.check_coded("cpu", torch.float32, kind, 7, 2, 128, 64, 1e-5, configs=CODED)


def test_grouped_codes_with_inputs_in_8_bits():
    """Rounded rows of h end with a rank's own pairs."""
    cases.check_coded("cpu", torch.float16, "fp8-rows", 7, 2, 128, 64, 1e-2, configs=CODED, round_from=0)


@pytest.mark.parametrize("rounds", [False, True])
def test_bytes_by_bytes(rounds):
    tile = BytesConfig(16, 128, 128, 4, 2, True, steps=rounds, rounds=rounds)
    both = tile, tile._replace(resident=1)
    cases.check_coded("cpu", torch.float16, "fp8-rows", 7, 2, 128, 128, 1e-2, byte_configs=both, round_from=0)


@pytest.mark.parametrize("kind", [None, "fp8-rows", "mxfp4"])
def test_programs_of_other_ranks_write_nothing(kind):
    cases.check_few_skip("cpu", kind, FEW)


def test_rows_past_the_own_pairs_are_not_rounded():
    x, end = torch.full((40, 128), 3.0), torch.tensor([2, 5, 5, 1], dtype=torch.int32)
    with cases.unwritten_is_nan():
        codes, scale = moe_bytes.round_rows(x, 128, end=end)
    assert codes[:5].float().unique().tolist() == [448.0] and codes[5:].float().isnan().all()
    torch.testing.assert_close(scale[:5], torch.full((5, 1), 3.0 / 448))
    assert scale[5:].isnan().all()


def test_parts_of_other_ranks_are_left_out():
    draw, here = Draw(0, "cpu", torch.float32), torch.tensor([[0, -1], [-1, 2], [-1, -1]], dtype=torch.int32)
    y, weights = draw.normal(3, 6, 40), draw.normal(3, 2)
    wanted = (y.sum(0).view(3, 2, 40) * (weights * (here >= 0))[..., None]).sum(1)
    y[:, here.flatten() < 0] = torch.nan
    parts = moe_mx.combine(y, weights, index=here).float()
    assert not parts[2].any() and (parts - wanted).norm() / wanted.norm() < 1e-2


def test_no_parts_for_a_norm():
    """A norm would add up what is not there."""
    draw, own = Draw(0, "cpu", torch.float32), cases.RANKS[0]
    w1, w2 = draw.normal(3, 32, 16), draw.normal(3, 16, 16)
    weights, index = cases.routed(draw, 5, 2)
    rest = cases.KNOWN | {"configs": TILES, "in_parts": True, "all_experts": cases.EXPERTS}
    here = cases.places(index, own)
    assert isinstance(moe.run_experts(draw.normal(5, 16), weights, here, w1, w2, **rest), torch.Tensor)


def test_tiles_are_those_of_one_rank(monkeypatch):
    """They go by the average number of pairs of all experts, of which a rank has its part."""
    chosen = []
    for module in (moe, moe_coded):
        plain = module.configs_of
        monkeypatch.setattr(
            module, "configs_of", lambda pairs, experts, *rest, plain=plain, **named: chosen.append((pairs, experts))
            or plain(pairs, experts, *rest, **named)
        )  # fmt: skip
    draw, index = Draw(0, "cpu", torch.float32), torch.full((6, 2), -1, dtype=torch.int32)
    x, weights = draw.normal(6, 128), torch.ones(6, 2)
    w1, w2 = draw.normal(2, 64, 128), draw.normal(2, 128, 32)
    assert not moe.run_experts(x, weights, index, w1, w2, all_experts=64, **cases.KNOWN).any()
    codes = make_codes("mxfp4", draw, 2, 64, 128), make_codes("mxfp4", draw, 2, 128, 32)
    assert not moe_coded.run_experts(x, weights, index, *codes, all_experts=64, **cases.KNOWN).any()
    assert chosen == [(12, 64)] * 2
    side = make_codes("fp8-rows", draw, 2, 256, 128)
    assert moe_bytes.configs_of(640, side, side, 64) == moe_bytes.configs_of(20, side, side)


def test_the_reference():
    cases.check_reference(7, 3, 128, 64)
