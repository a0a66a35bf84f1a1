"""Sizes that do not fit one another are refused by the compiled kernels themselves, whoever gave them.

All cases run in one process of their own: without a check they end it by a signal, or write where nothing is theirs.
"""

import subprocess
import sys

import pytest

from quire.ops.cpu.native import kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")

SCRIPT = """
import ctypes, torch
from quire.ops.cpu.block import BlocksCall, BlockParts, NativeStep, StepTurn, Weights
from quire.ops.cpu.moe_forms import MatrixWork, MoeWork, matrix_work
from quire.ops.cpu.native import AttentionWork, KernelError, Segment, kernels
from quire.ops.few import NormRule
from quire.ops.qkv import QkvPrep

library = kernels()
TOKENS, HEADS, KV, SIZE, BLOCK = 3, 4, 2, 16, 8

def step_work(held):
    held += [torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32),
             torch.tensor([TOKENS], dtype=torch.int32), torch.arange(TOKENS)]
    work = AttentionWork()
    work.tables, work.query_starts, work.contexts, work.slots = (tensor.data_ptr() for tensor in held[-4:])
    work.tokens, work.rows, work.table_stride, work.block_size = TOKENS, 1, 1, BLOCK
    return work

def attend(**over):
    held = []
    work = step_work(held)
    held += [torch.randn(TOKENS, (HEADS + 2 * KV) * SIZE), torch.zeros(TOKENS, HEADS * SIZE),
             torch.zeros(BLOCK, 2 * KV * SIZE), torch.ones(TOKENS, SIZE), torch.zeros(TOKENS, SIZE)]
    work.qkv, work.out, work.cache, work.cos, work.sin = (tensor.data_ptr() for tensor in held[-5:])
    work.qkv_stride, work.cache_stride = (HEADS + 2 * KV) * SIZE, 2 * KV * SIZE
    work.heads, work.kv_heads, work.size, work.turned, work.scale = HEADS, KV, SIZE, SIZE, 0.25
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_attend(ctypes.byref(work))
    return bool(held[5].isfinite().all())

def blocks(heads=HEADS, kv=KV, turned=SIZE, ffn=24, up=48, o=HEADS * SIZE, act=0, width=32):
    held = []
    step = NativeStep()
    step.work = step_work(held)
    shapes = (((HEADS + 2 * KV) * SIZE, width), (width, o), (up, width), (width, ffn))
    products = tuple(Weights(torch.randn(shape) / 8, None) for shape in shapes)
    norm = NormRule(torch.ones(width), 1e-5, 0.0, False)
    prep = QkvPrep(heads, kv, None, None, 0.0, 0.0, False, None, None, False)
    cache = torch.zeros(BLOCK, 2 * KV * SIZE)
    parts = BlockParts(products, (norm, norm), prep, cache, 0.25, 0.0, None, None, act)
    call = BlocksCall(library, [parts], [0], torch.float32)
    turn = StepTurn(step, torch.ones(TOKENS, 1, turned), torch.zeros(TOKENS, 1, turned))
    return bool(call(torch.randn(TOKENS, width), None, [turn])[1].isfinite().all())

def experts(index=1, top_k=2, ffn=24, up=48, act=0, count=4):
    held, width = [], 32
    own = [[torch.randn(shape) for _ in range(count)] for shape in ((up, width), (width, ffn))]
    arrays = [(MatrixWork * count)(*(matrix_work(Weights(made, None), held) for made in side)) for side in own]
    x, weights, out = torch.randn(TOKENS, width), torch.ones(TOKENS, 2), torch.zeros(TOKENS, width)
    chosen = torch.tensor([[0, index]] * TOKENS)
    work = MoeWork(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), x.data_ptr(), weights.data_ptr(),
                   chosen.data_ptr(), None, out.data_ptr(), TOKENS, count, top_k, act, 0, 0.0, 0.0)
    library.qc_run_moe(ctypes.byref(work))
    return bool(out.isfinite().all())

def packed(kind=5, width=32, count=1):
    x, out = torch.randn(1, 32), torch.zeros(1, 16)
    data = torch.zeros(library.qc_packed_bytes(5, 16, 32), dtype=torch.uint8)
    segments = (Segment * 1)(Segment(kind, 16, data.data_ptr()))
    library.qc_linear_packed(x.data_ptr(), 32, 1, width, ctypes.addressof(segments), count, None, out.data_ptr(), 16, 0)
    return True

def gated(act=0, dtype=0):
    x, out = torch.randn(2, 32), torch.zeros(2, 16)
    library.qc_gated(act, x.data_ptr(), 32, out.data_ptr(), 2, 16, dtype)
    return True

for call in (attend, blocks, experts, packed, gated):
    assert call(), call
WRONG = [
    *((attend, over) for over in (
        dict(turned=65536), dict(turned=18), dict(turned=15), dict(turned=-2), dict(kv_heads=8), dict(kv_heads=3),
        dict(kv_heads=0), dict(heads=0), dict(heads=-4), dict(size=0), dict(size=100000), dict(block_size=0),
        dict(cache_stride=8), dict(qkv_stride=8), dict(dtype=9), dict(cache_dtype=9), dict(turn_dtype=1),
        dict(tokens=-1), dict(window=-1), dict(chunk=-7), dict(cache_dtype=3),
    )),
    *((blocks, over) for over in (
        dict(turned=65536), dict(turned=18), dict(kv=8, heads=4), dict(heads=6, kv=1), dict(ffn=96), dict(up=40),
        dict(o=48), dict(act=77), dict(act=-1),
    )),
    *((experts, over) for over in (
        dict(index=10**9), dict(index=-3), dict(index=4), dict(top_k=0), dict(top_k=5), dict(ffn=96), dict(act=77),
    )),
    *((packed, over) for over in (dict(kind=99), dict(kind=-1), dict(width=31), dict(width=0), dict(count=0))),
    *((gated, over) for over in (dict(act=99), dict(act=-1), dict(dtype=7))),
]
for call, over in WRONG:
    print(call.__name__, over, flush=True)
    try:
        call(**over)
    except KernelError as wrong:
        print("  refused:", wrong, flush=True)
    else:
        raise SystemExit(f"{call.__name__} {over} was computed")
print("all refused")
"""


def test_sizes_that_do_not_fit_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.endswith("all refused\n"), done.stdout[-800:] + done.stderr[-2000:]
    assert "a rotation that is not pairs of numbers within a head" in done.stdout
