"""Experts in MXFP4 in the form that the kernel of Hopper reads (ops/mx_experts.py): what is put comes out again."""

import pytest
import torch

from quire.ops import coded_experts as ops
from quire.ops import mx_experts
from quire.ops.mx_experts import MxCodes, multiplies_mx, shapes_of
from quire.ops.op import Kernels


def empty(experts, rows, width, gated):
    shapes = shapes_of(experts, rows, width)
    return MxCodes(*(torch.full(shape, -1, dtype=torch.int32) for shape in shapes), rows, width, gated)


def draw(rows, width, seed=0):
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, width), generator=dice).to(torch.uint8)
    return codes, torch.randint(100, 140, (rows, width // 32), generator=dice).to(torch.uint8)


@pytest.mark.parametrize("gated", [False, True])
def test_what_is_put_comes_out_again(gated):
    """In parts, in another order, beside another expert; and every number is that of the plain form."""
    rows, width = 96, 192
    w = empty(2, rows, width, gated)
    assert w.shape == (2, rows, width)
    given = [draw(rows, width, seed) for seed in range(2)]
    for expert, (codes, scale) in enumerate(given):
        for start in (48, 0):
            some = slice(start, start + 48)
            assert w.put(expert, start, codes[some], scale[some])
    for expert, (codes, scale) in enumerate(given):
        found = w.opened(expert)
        assert torch.equal(found[0], codes) and torch.equal(found[1], scale)
        padding = torch.nn.functional.pad(scale, (0, 2))
        plain = ops.ExpertCodes("e2m1", ops.close_chunks(codes)[None], width, padding[None], (1, 32))
        numbers = plain.numbers(0)
        assert torch.equal(w.numbers(expert), numbers)
        for start, stop in ((0, 5), (3, 17), (40, 90), (89, 200)):
            assert torch.equal(w.numbers(expert, start, stop), numbers[start:stop])
    assert w.codes.nbytes + w.scale.nbytes == 2 * rows * width * 17 // 32  # 4.25 bits a number


def test_scales_that_are_not_exact_are_told():
    """And come out again all the same; a block of zeros may have a small one."""
    codes, scale = draw(16, 64)
    least, most = mx_experts._LEAST, mx_experts._MOST
    for exponent, fits in (
        (least, True),
        (most, True),
        (least - 1, False),
        (0, False),
        (most + 1, False),
        (255, False),
    ):
        w = empty(1, 16, 64, False)
        changed = scale.clone()
        changed[9, 1] = exponent
        assert bool(w.put(0, 0, codes, changed)) == fits, exponent
        assert torch.equal(w.opened(0)[1], changed) and torch.equal(w.opened(0)[0], codes)
        zeros = codes.clone()
        zeros[9, 32:] = torch.tensor([0, 8]).repeat(16)
        assert bool(w.put(0, 0, zeros, changed)) == (exponent <= most)


def test_other_devices_have_no_such_kernel():
    assert not Kernels.here("cpu").of(multiplies_mx)(torch.bfloat16, 128, 128, torch.nn.functional.silu)


def test_any_bytes_are_codes():
    w = empty(1, 16, 64, False)
    w.fill(torch.randint(0, 256, (97,), generator=torch.Generator().manual_seed(0)).to(torch.uint8), 120)
    numbers = w.numbers(0)
    assert numbers.isfinite().all() and set((numbers.abs() * 128).flatten().tolist()) <= set(ops.E2M1)
    assert 0.01 < numbers.std() < 0.04
