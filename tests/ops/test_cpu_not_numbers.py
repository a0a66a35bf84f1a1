"""Inputs that are no numbers: rows beside them keep their bits, their own are no numbers either, nothing else happens.

Under sanitizers (`make sanitize`) sums of their bits and casts of them would end the process.
"""

import ctypes
import struct

import pytest
import torch

from quire.ops.cpu.native import CACHE_DTYPES, DTYPES, AttentionWork, kernels
from tests.ops.test_cpu_native import GGUF, multiply, pack

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
library = kernels()
HEADS, KV, SIZE, BLOCK = 4, 2, 16, 8
# Quiet and signalling, of either sign, with all bits and with one, and what is beyond all numbers.
BITS = (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000)
HOSTILE = torch.tensor([struct.unpack("<f", struct.pack("<I", bits))[0] for bits in BITS])
LARGE = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38, 0.0, -0.0])


def rows_of(width: int, dtype: torch.dtype) -> torch.Tensor:
    """One good row, then one for each hostile number, somewhere within."""
    x = torch.randn(1 + len(HOSTILE), width, generator=torch.Generator().manual_seed(3))
    for row, value in enumerate(HOSTILE, 1):
        x[row, row * 5 % width] = value
    return x.to(dtype)


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_products(isa, name, dtype):
    matrix, _ = pack(name, 32, 512)
    x = rows_of(512, dtype)
    found = multiply(x, [matrix])
    assert torch.equal(found[:1], multiply(x[:1], [matrix])) and found[0].isfinite().all()
    assert not found[1:].isfinite().all(1).any()  # each has columns that show it
    for large in LARGE:
        same = multiply(torch.full((9, 512), large.item()).to(dtype), [matrix])
        assert all(torch.equal(row.isfinite(), same[0].isfinite()) for row in same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows(isa, dtype):
    x, weight = rows_of(100, dtype), torch.ones(100, dtype=dtype)
    count, number = len(x), DTYPES[dtype]
    out, alone = torch.empty_like(x), torch.empty_like(x[:1])
    for rows, to in ((count, out), (1, alone)):
        library.qc_rms_norm(
            x.data_ptr(), 100, None, weight.data_ptr(), None, to.data_ptr(), rows, 100, 1e-5, 0.0, 0, number
        )
    assert torch.equal(out[:1], alone) and out[0].isfinite().all() and not out[1:6].isfinite().all()
    gated = torch.empty(count, 50, dtype=dtype)
    for act in range(5):
        library.qc_gated(act, x.data_ptr(), 100, gated.data_ptr(), count, 50, number)
        assert gated[0].isfinite().all()
    best, logs = torch.empty(count, dtype=torch.int64), torch.empty(count, 100)
    library.qc_argmax(x.data_ptr(), 100, count, 100, best.data_ptr(), number)
    library.qc_log_softmax(x.data_ptr(), 100, count, 100, logs.data_ptr(), number)
    assert ((best >= 0) & (best < 100)).all() and logs[0].isfinite().all()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("value", [*HOSTILE.tolist(), *LARGE.tolist()])
def test_keys_and_values(isa, cache_dtype, value):
    """Rounded to bytes, too, where a cast of what is no number is not defined. Row 0 has one token, row 1 two."""
    qkv = torch.randn(3, (HEADS + 2 * KV) * SIZE, generator=torch.Generator().manual_seed(4))
    qkv[1, -3:] = value
    qkv[1, HEADS * SIZE + 2] = value
    both, alone = attend(qkv, [1, 2], cache_dtype), attend(qkv[:1], [1], cache_dtype)
    assert torch.equal(both[:1], alone) and alone.isfinite().all()


def attend(qkv, counts, cache_dtype):
    qkv, width = qkv.clone(), 2 * KV * SIZE + (8 * KV if cache_dtype is torch.int8 else 0)
    ends = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    slots = torch.cat([torch.arange(count) + row * BLOCK for row, count in enumerate(counts)])
    held = {
        "qkv": qkv, "out": torch.empty(len(qkv), HEADS * SIZE), "query_starts": ends, "slots": slots,
        "cache": torch.zeros(len(counts) * BLOCK, width, dtype=cache_dtype),
        "tables": torch.arange(len(counts), dtype=torch.int32), "contexts": torch.tensor(counts, dtype=torch.int32),
    }  # fmt: skip
    work = AttentionWork(**{name: tensor.data_ptr() for name, tensor in held.items()})
    work.tokens, work.rows, work.table_stride, work.block_size = len(qkv), len(counts), 1, BLOCK
    work.qkv_stride, work.cache_stride, work.cache_slots = qkv.shape[1], width, len(counts) * BLOCK
    work.cache_dtype = CACHE_DTYPES[cache_dtype]
    work.heads, work.kv_heads, work.size, work.scale = HEADS, KV, SIZE, 0.25
    library.qc_attend(ctypes.byref(work))
    return held["out"]
