"""A whole block by tile registers (csrc/cpu/block_tiles.h) against the same kernels one after another, emulated."""

import ctypes

import pytest
import torch

from quire.ops import packed
from quire.ops.cpu.block import BlockWork, MatrixWork, TurnWork
from quire.ops.cpu.native import DTYPES, KINDS, AttentionWork, Segment
from tests.emulated_tiles import CANNOT_BUILD, build, draw, laid, random_panels

pytestmark = CANNOT_BUILD

HEADS, KV_HEADS, SIZE, WIDTH, FFN = 6, 2, 32, 96, 160
ROWS = {"qkv": (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), "o": (WIDTH,), "up": (FFN, FFN), "down": (WIDTH,)}
INNER = {"qkv": WIDTH, "o": HEADS * SIZE, "up": WIDTH, "down": FFN}


class Case:
    def __init__(self, kind, dtype, m, act, fused, bias):
        self.held, self.m, self.dtype = [], m, dtype
        work = BlockWork()
        for i, (name, rows) in enumerate(ROWS.items()):
            rows = (sum(rows),) if fused else rows
            parts = [self.part(kind, count, INNER[name], 10 * i + j) for j, count in enumerate(rows)]
            segments = (Segment * len(parts))(*(Segment(KINDS[p.kind], p.rows, p.data.data_ptr()) for p in parts))
            added = draw(sum(rows), seed=90 + i, dtype=dtype) if bias and name != "up" else None
            self.held += [parts, segments, added]
            at = None if added is None else added.data_ptr()
            matrix = MatrixWork(ctypes.addressof(segments), None, at, len(parts), sum(rows), INNER[name], 0)
            setattr(work, name, matrix)
        for i in range(2):
            weight = (draw(WIDTH, seed=80 + i) * 0.1 + 1).to(dtype)
            self.held.append(weight)
            work.norm_weight[i], work.eps[i], work.wide[i] = weight.data_ptr(), 1e-5, i
        work.act, work.dtype = act, DTYPES[dtype]
        self.cache = torch.zeros(64 * 16, 2 * KV_HEADS * SIZE, dtype=torch.bfloat16)
        attention = work.attention
        attention.heads, attention.kv_heads, attention.size, attention.scale = HEADS, KV_HEADS, SIZE, SIZE**-0.5
        attention.dtype, attention.cache_dtype, attention.cache_stride = DTYPES[dtype], 1, self.cache.shape[1]
        attention.cache = self.cache.data_ptr()
        self.work, self.turn = work, self.step()

    @staticmethod
    def part(kind, rows, width, seed):
        return laid(rows, width, seed) if kind == "B16" else random_panels(kind, rows, width, seed)

    def step(self):
        """Two rows of prompts."""
        first = self.m // 3
        tables = torch.arange(2 * 32, dtype=torch.int32).view(2, 32)
        lengths = (first, self.m - first)
        places = [
            row.repeat_interleave(16)[:n] * 16 + torch.arange(n) % 16 for row, n in zip(tables, lengths, strict=True)
        ]
        kept = {
            "slots": torch.cat(places).long(), "tables": tables,
            "query_starts": torch.tensor([0, first, self.m], dtype=torch.int32),
            "contexts": torch.tensor(lengths, dtype=torch.int32),
        }  # fmt: skip
        step = AttentionWork(**{name: tensor.data_ptr() for name, tensor in kept.items()})
        step.tokens, step.rows, step.table_stride, step.block_size = self.m, 2, 32, 16
        angles = torch.arange(self.m)[:, None] * torch.linspace(0.01, 1, SIZE // 2)[None]
        cos, sin = (torch.cat((f(angles),) * 2, 1).to(self.dtype).contiguous() for f in (torch.cos, torch.sin))
        self.held += [kept, step, cos, sin]
        return TurnWork(ctypes.addressof(step), cos.data_ptr(), sin.data_ptr(), SIZE, DTYPES[self.dtype])

    def run(self, blocks, tiles, with_delta):
        x, delta = draw(self.m, WIDTH, seed=1, dtype=self.dtype), draw(self.m, WIDTH, seed=2, dtype=self.dtype)
        stream, out = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        self.cache.zero_()
        blocks.tiles_block(
            ctypes.addressof(self.work), ctypes.addressof(self.turn), x.data_ptr(),
            delta.data_ptr() if with_delta else None, stream.data_ptr(), out.data_ptr(), tiles,
        )  # fmt: skip
        return stream, out, self.cache.clone()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory)


@pytest.fixture
def blocks(library):
    library.tiles_threads(2)
    return library


@pytest.mark.parametrize("m", [2, 6, 24, 33, 70])
@pytest.mark.parametrize("act", range(5))
def test_plain_numbers_have_the_same_bits(blocks, m, act):
    case = Case("B16", torch.bfloat16, m, act, fused=act % 2 == 0, bias=act == 3)
    assert blocks.tiles_in_use(ctypes.addressof(case.work))
    for with_delta in (False, True):
        found, wanted = case.run(blocks, 1, with_delta), case.run(blocks, 0, with_delta)
        for here, there in zip(found, wanted, strict=True):
            assert torch.isfinite(there.float()).all() and torch.equal(here, there)


@pytest.mark.parametrize("kind", [kind for kind in packed.FORMS if not kind.startswith("B")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [5, 41])
def test_stored_blocks(blocks, kind, dtype, m):
    case = Case(kind, dtype, m, 0, fused=False, bias=kind == "Q8Z")
    assert blocks.tiles_in_use(ctypes.addressof(case.work))
    for here, there in zip(case.run(blocks, 1, True), case.run(blocks, 0, True), strict=True):
        assert torch.isfinite(there.float()).all() and torch.equal(here, there)
