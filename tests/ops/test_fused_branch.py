"""A layer whose plan fuses norm, rotation and cache write hands over data that mean what its own steps compute."""

import pytest
import torch

from quire.layers.attention import Attention, AttentionKind
from quire.layers.batch import Batch
from quire.layers.norm import NormKind
from quire.layers.rope import Rope, RopeKind
from quire.ops.op import Kernels
from quire.ops.qkv import prepare_qkv
from quire.quant.plain import plain_storage

TOKENS, WIDTH = 5, 24
STORAGE = plain_storage(torch.float32, Kernels.here("cpu"))


class Seen:
    """A plan that attends to nothing and remembers what it was given; `fused`: by way of the op."""

    def __init__(self, fused):
        self.parts = None
        self.run_fused = self._fused if fused else None

    def run(self, q, k, v, cache, **rest):
        self.parts = q, k, v
        return q

    def _fused(self, qkv, prep, cache, **rest):
        keys, values = torch.zeros((2, 4, 2, prep.kv_heads, qkv.shape[1] // (prep.heads + 2 * prep.kv_heads)))
        q = prepare_qkv(qkv, prep, keys, values, torch.arange(TOKENS))
        self.parts = q, keys.flatten(0, 1)[:TOKENS], values.flatten(0, 1)[:TOKENS]
        return q


def layer_of(kind, rope):
    torch.manual_seed(0)
    layer = Attention("a.", WIDTH, kind, rope, STORAGE)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return layer


@pytest.mark.parametrize("norm", [NormKind(), NormKind(plus_one=True), NormKind(wide=True, eps=1e-5)])
@pytest.mark.parametrize("qk_norm", ["", "head", "each"])
@pytest.mark.parametrize("rope", [None, RopeKind(dim=8), RopeKind(dim=8, pairs=True), RopeKind(dim=4)])
def test_both_branches_agree(rope, qk_norm, norm):
    turner = None if rope is None else Rope(rope, 64, STORAGE)
    layer = layer_of(AttentionKind(4, 2, 8, 1.0, qk_norm=qk_norm, qk_norm_kind=norm, qkv_bias=True), turner)
    assert layer.fusable
    x, positions = torch.randn(TOKENS, WIDTH), torch.arange(TOKENS) * 7
    turn = None if turner is None else turner(positions)
    seen = []
    for plan in (Seen(False), Seen(True)):
        layer(x, Batch(positions, positions, [plan], positions, TOKENS), turn)
        seen.append(plan.parts)
    for plain, fused in zip(*seen, strict=True):
        torch.testing.assert_close(fused, plain)


def test_what_the_op_cannot_express_is_not_fused():
    for kind in (
        AttentionKind(4, 2, 8, 1.0, qk_norm="full"), AttentionKind(4, 2, 8, 1.0, qkv_clip=1.0),
        AttentionKind(4, 2, 8, 1.0, grow=(0.1, 16, 0)),
        AttentionKind(4, 2, 8, 1.0, qk_norm="head", qk_norm_kind=NormKind(kind="layer")),
    ):  # fmt: skip
        layer, plan = layer_of(kind, None), Seen(True)
        layer(
            torch.randn(TOKENS, WIDTH), Batch(*[torch.arange(TOKENS)] * 2, [plan], torch.arange(TOKENS), TOKENS), None
        )
        assert not layer.fusable and plan.parts[0].shape == (TOKENS, 4, 8) and len(plan.parts[1]) == TOKENS
