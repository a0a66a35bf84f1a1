"""Tile registers and pairs of bfloat16 (csrc/cpu: amx, opened, float_tiles, texts, attention_tiles, bfloats) on any
machine.

Only the instructions are emulated, everything around them is real. On a machine that has them, test_cpu_native.py runs
the instruction sets `amx` and `avx512bf16` themselves.
"""

import ctypes
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from quire.ops import packed
from quire.ops.attention import ragged_attention
from quire.ops.cpu.native import CACHE_DTYPES, DTYPES, KINDS, AttentionWork, Segment
from quire.ops.cpu.text_forms import ragged_form
from tests.emulated_tiles import CANNOT_BUILD, build, draw, laid, random_panels
from tests.ops.test_cpu_texts import softmax_of_texts
from tests.products import spread

BLOCKS = [kind for kind in KINDS if not kind.startswith("B")]  # kinds with scales
pytestmark = CANNOT_BUILD


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory)


def multiply(library, x, parts, bias=None):
    segments = (Segment * len(parts))(*(Segment(KINDS[p.kind], p.rows, p.data.data_ptr()) for p in parts))
    rows = sum(p.rows for p in parts)
    out = torch.full((x.shape[0], rows), float("nan"), dtype=x.dtype)
    library.tiles_packed(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], ctypes.addressof(segments), len(parts),
        None if bias is None else bias.data_ptr(), out.data_ptr(), rows, DTYPES[x.dtype],
    )  # fmt: skip
    return out


ROWS = (1, 2, 5, 9, 16, 17, 23, 48, 64, 70, 150)


def opened(library, part):
    """Numbers of packed panels as tiles have them: [rows, width]."""
    step, blocks = packed.FORMS[part.kind].num_bytes, part.width // 32
    found = torch.empty(-(-part.rows // 16) * blocks, 16, 16, 2, dtype=torch.bfloat16)  # pairs, columns
    for i, tile in enumerate(found):
        library.tiles_open(KINDS[part.kind], part.data.data_ptr() + i * step, tile.data_ptr())
    rows = found.float().unflatten(0, (-1, blocks)).permute(0, 3, 1, 2, 4)
    return rows.reshape(-1, part.width)[: part.rows]


@pytest.mark.parametrize("kind", BLOCKS)
def test_opened_panels(library, kind):
    """Numbers are cut to 8 bits so that they err by less than three quarters of a unit, and hardly to one side."""
    part = random_panels(kind, 69, 256, 1)
    exact, found = packed.unpack(part), opened(library, part)
    unit = torch.exp2(exact.abs().log2().floor() - 7)
    step = exact.abs().max() / 2 ** packed.FORMS[kind].bits  # numbers near 0 err by a part of their scale instead
    assert ((found - exact).abs() <= 0.75 * unit + step / 64).all()
    large = exact.abs() > 4 * step
    assert ((found - exact) * exact.sign() / exact.abs())[large].mean().abs() < 2**-11


@pytest.mark.parametrize(("kind", "width", "dtype"), spread(BLOCKS, [32, 96, 256], [torch.float32, torch.bfloat16]))
def test_packed_products(library, kind, width, dtype):
    parts = [random_panels(kind, 69, width, 1), random_panels("Q8Z", 16, width, 2), random_panels(kind, 5, width, 3)]
    weight = torch.cat([opened(library, part) for part in parts])
    bias = draw(90, seed=3, dtype=dtype)
    library.tiles_threads(1 if width == 96 else 2)
    for m in ROWS:
        x = draw(m, width, seed=m, dtype=dtype)
        found = multiply(library, x, parts, bias)
        wanted = F.linear(x.bfloat16().float(), weight, bias.float())
        close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(found.float(), wanted, **close)
        for row in {0, 7 % m, m - 1}:
            assert torch.equal(multiply(library, x[row : row + 1], parts, bias)[0], found[row])
        for many in (2, 5, 9, 48):
            assert torch.equal(multiply(library, x[-many:], parts, bias), found[-many:])


@pytest.mark.parametrize("width", [32, 96, 256])
def test_products_of_panels(library, width):
    parts = [laid(80, width, 1), laid(16, width, 2), laid(48, width, 3)]
    weight = torch.cat([packed.unpack(part) for part in parts])
    library.tiles_threads(1 if width == 96 else 2)
    for m in (0, 3, 6, 7, 33, *ROWS):
        x = draw(m, width + 32, seed=m, dtype=torch.bfloat16)[:, :width]
        for bias in (None, draw(144, seed=3, dtype=torch.bfloat16)):
            found = multiply(library, x, parts, bias)
            wanted = F.linear(x.float(), weight, None if bias is None else bias.float())
            torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0.02)
            for row in {0, m // 2, m - 1} if m else ():
                assert torch.equal(multiply(library, x[row : row + 1], parts, bias)[0], found[row])
            for many in (2, 5, 9, 48):
                assert torch.equal(multiply(library, x[-many:], parts, bias), found[-many:])


@pytest.mark.parametrize("width", [32, 96, 256])
def test_products_of_float32(library, width):
    """In three parts of bfloat16 each: sums err as those of float32 do."""
    parts = [laid(80, width, 1, torch.float32), laid(16, width, 2, torch.float32), laid(48, width, 3, torch.float32)]
    weight = torch.cat([packed.unpack(part) for part in parts]).double()
    library.tiles_threads(1 if width == 96 else 2)
    for m in (0, 3, 6, 33, *ROWS):
        x = draw(m, width + 32, seed=m)[:, :width]
        for bias in (None, draw(144, seed=3)):
            found = multiply(library, x, parts, bias)
            wanted = F.linear(x.double(), weight, None if bias is None else bias.double())
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)
            for row in {0, m // 2, m - 1} if m else ():
                assert torch.equal(multiply(library, x[row : row + 1], parts, bias)[0], found[row])
            for many in (2, 5, 17, 48):
                assert torch.equal(multiply(library, x[-many:], parts, bias), found[-many:])


@pytest.mark.parametrize(("size", "kv_heads", "window"), [(32, 4, 0), (64, 2, 20), (48, 4, 0)])
def test_attention_within_texts(library, size, kv_heads, window):
    """Of texts that tiles take (64 keys and more), shorter ones, and heads that they do not take (48)."""
    lens, library_form = (64, 5, 70, 63, 97), ragged_form(library_of(library), ragged_attention.reference)
    library.tiles_threads(2 if window else 1)
    q, k, v = draw(sum(lens), (4 + 2 * kv_heads) * size).view(sum(lens), -1, size).split((4, kv_heads, kv_heads), 1)
    found = library_form(q, k, v, lens, lens, scale=0.2, window=window)
    wanted = softmax_of_texts(q, k, v, lens, lens, 0.2, window)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-6)
    alone = library_form(q[69:139], k[69:139], v[69:139], lens[2:3], lens[2:3], scale=0.2, window=window)
    assert torch.equal(alone, found[69:139])


def library_of(emulated):
    return SimpleNamespace(qc_attend_texts=emulated.tiles_texts)


@pytest.mark.parametrize(
    ("size", "biased", "by"),
    spread(
        [(1, 7), (64, 64), (70, 129), (200, 96), (16, 32), (33, 320)], [False, True], ["tiles_plain", "pairs_plain"]
    ),
)
def test_plain_products(library, size, biased, by):
    n, k = size
    weight = draw(n, k + 5, seed=1, dtype=torch.bfloat16)[:, :k]
    bias = draw(n, seed=2, dtype=torch.bfloat16) if biased else None

    def run(x):
        out = torch.full((len(x), n), float("nan"), dtype=x.dtype)
        getattr(library, by)(
            x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), None if bias is None else bias.data_ptr(),
            out.data_ptr(), n, len(x), n, k,
        )  # fmt: skip
        return out

    library.tiles_threads(2 if biased else 1)
    for m in (1, 2, 15, 16, 17, 33, 100):
        x = draw(m, k + 3, seed=m, dtype=torch.bfloat16)[:, 2 : 2 + k]
        found = run(x)
        wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
        for row in {0, m // 2, m - 1}:
            assert torch.equal(run(x[row : row + 1])[0], found[row])


class Attended:
    """Rows of a step over a paged cache of bfloat16: [(context, queries), ...]; keys and values all drawn before."""

    def __init__(self, rows, size, dtype, block=16, heads=(6, 2)):
        self.rows, self.size, self.block = rows, size, block
        self.heads, self.kv_heads = heads
        tokens = sum(queries for _, queries in rows)
        blocks = [-(-context // block) for context, _ in rows]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(5)).int()
        self.tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        self.cache = torch.full((sum(blocks) * block, 2 * self.kv_heads * size), float("nan"), dtype=torch.bfloat16)
        for i, part in enumerate(order.split(blocks)):  # behind a row's last token there may be anything
            self.tables[i, : len(part)] = part
            slots = self.slots_of(i)
            self.cache[slots] = draw(len(slots), self.cache.shape[1], seed=60 + i, dtype=torch.bfloat16)
        self.qkv = draw(tokens, (self.heads + 2 * self.kv_heads) * size, seed=7, dtype=dtype)
        self.slots = torch.full((tokens,), -1)  # nothing new is written
        self.starts = torch.tensor([0, *(queries for _, queries in rows)]).cumsum(0).int()
        self.contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)

    def slots_of(self, row):
        at = torch.arange(self.rows[row][0])
        return self.tables[row].long()[at // self.block] * self.block + at % self.block

    def run(self, library, **options):
        out = torch.full((len(self.qkv), self.heads * self.size), float("nan"), dtype=self.qkv.dtype)
        held = {"qkv": self.qkv, "out": out, "cache": self.cache, "slots": self.slots, "tables": self.tables,
                "query_starts": self.starts, "contexts": self.contexts}  # fmt: skip
        held |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        work = AttentionWork(**{name: tensor.data_ptr() for name, tensor in held.items()})
        work.tokens, work.rows, work.qkv_stride = len(self.qkv), len(self.rows), self.qkv.stride(0)
        work.cache_stride, work.table_stride = self.cache.stride(0), self.tables.stride(0)
        work.block_size, work.scale = self.block, self.size**-0.5
        work.dtype, work.cache_dtype = DTYPES[self.qkv.dtype], CACHE_DTYPES[torch.bfloat16]
        work.heads, work.kv_heads, work.size = self.heads, self.kv_heads, self.size
        for name, value in options.items():
            if not isinstance(value, torch.Tensor):
                setattr(work, name, value)
        library.tiles_attend(ctypes.byref(work))
        return out

    def wanted(self, window=0, chunk=0, softcap=0.0, sinks=None, alibi=None):
        found = []
        for i, (context, queries) in enumerate(self.rows):
            at = torch.arange(context)
            keys, values = self.cache[self.slots_of(i)].float().view(context, 2, self.kv_heads, self.size).unbind(1)
            q = self.qkv[self.starts[i] : self.starts[i + 1], : self.heads * self.size].float()
            q = q.view(queries, self.kv_heads, -1, self.size)
            scores = torch.einsum("qgrd,kgd->grqk", q, keys).flatten(0, 1) * self.size**-0.5
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            position = (context - queries + torch.arange(queries))[:, None]
            if alibi is not None:
                scores = scores - alibi[:, None, None] * (position - at)
            hidden = at > position
            if window:
                hidden |= position - at >= window
            if chunk:
                hidden |= at < position // chunk * chunk
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, queries, 1)], -1)
            weights = scores.softmax(-1)[..., :context].unflatten(0, (self.kv_heads, -1))
            found.append(torch.einsum("grqk,kgd->qgrd", weights, values).reshape(queries, -1))
        return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "options", "sizes"),
    spread([torch.float32, torch.bfloat16], [{}, {"window": 50}, {"softcap": 3.0}], [(64, 16), (96, 8)]),
)
def test_attention(library, dtype, options, sizes):
    size, block = sizes
    step = Attended([(150, 150), (70, 1), (1100, 40), (200, 3), (33, 16)], size, dtype, block)
    library.tiles_threads(2)
    found, wanted = step.run(library, **options).float(), step.wanted(**options)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def check_rounded(found, wanted, dtype):
    """Scores err by 2^-9 of each product of a rounded query, weights and (bfloat16) results by 2^-9 of themselves."""
    assert found.isfinite().all()
    error = (found.float() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert error.max() < (6e-3 if dtype != torch.bfloat16 else 8e-3), error.max()


DECODE = [(1, 1), (192, 1), (15, 1), (16, 1), (64, 1), (65, 1), (130, 1), (33, 1), (81, 1), (200, 1)]


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("heads", "form"),
    spread(
        [(9, 3), (32, 8), (8, 8), (16, 1), (71, 1), (64, 8), (12, 12), (20, 2)],
        [(64, 16, F32), (64, 16, BF16), (32, 8, F16), (96, 32, F32), (128, 64, BF16), (256, 16, F32)],
    ),
)
def test_decode_attention(library, heads, form):
    size, block, dtype = form
    rows = DECODE if size * heads[0] <= 2048 else DECODE[3:6]  # emulation takes its time
    step = Attended(rows, size, dtype, block, heads)
    library.tiles_threads(1 + size // 32 % 2)
    found = step.run(library)
    check_rounded(found, step.wanted(), dtype)
    alone = Attended(rows[:1], size, dtype, block, heads)
    alone.cache, alone.tables = step.cache, step.tables  # one row is cut by kv heads, which changes no bits
    assert torch.equal(alone.run(library), found[:1])


@pytest.mark.parametrize("seed", range(12))
def test_any_attention(library, seed):
    """Prompts, parts of prompts, decodes of a few tokens in any order."""
    random = Random(seed)
    kv_heads = random.choice([1, 2, 3, 5])
    heads = kv_heads * random.choice([1, 2, 3, 4, 7, 9])
    contexts = [random.randint(1, random.choice([20, 200, 1200])) for _ in range(random.randint(1, 12))]
    rows = [(context, min(context, random.choice([1, 1, 2, 3, 5, 40]))) for context in contexts]
    options = random.choice([{}, {"window": random.randint(1, 300)}, {"chunk": random.randint(1, 300)}])
    step = Attended(rows, random.choice([32, 64, 96]), F32, random.choice([8, 16, 24, 32]), (heads, kv_heads))
    library.tiles_threads(random.randint(1, 3))
    check_rounded(step.run(library, **options), step.wanted(**options), F32)


class Chunk(Attended):
    """Some queries of one row of another step, as an earlier step with fewer neighbours would have them."""

    def __init__(self, step, row, first, count):
        self.rows = [(step.rows[row][0] - step.rows[row][1] + first + count, count)]
        self.size, self.block, self.heads, self.kv_heads = step.size, step.block, step.heads, step.kv_heads
        self.cache, self.tables = step.cache, step.tables[row : row + 1]
        self.at = int(step.starts[row]) + first
        self.qkv, self.slots = step.qkv[self.at : self.at + count], step.slots[:count]
        self.starts = torch.tensor([0, count], dtype=torch.int32)
        self.contexts = torch.tensor([self.rows[0][0]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "options", "dtype"),
    spread(
        [(9, 3), (4, 4), (20, 2)],
        [{}, {"window": 50}, {"chunk": 70}, {"softcap": 3.0}, {"alibi": True}],
        [F32, BF16],
    ),
)
def test_a_query_has_the_same_bits_in_every_chunk(library, heads, options, dtype):
    """Prompts whole, in parts and token by token, beside others or alone, by one thread or more."""
    if "alibi" in options:
        options = {"alibi": torch.arange(heads[0]) / 40}
    step = Attended([(150, 150), (70, 1), (1100, 40), (200, 3), (33, 16), (65, 1)], 64, dtype, 16, heads)
    library.tiles_threads(3)
    found = step.run(library, **options)
    for row, (_, queries) in enumerate(step.rows):
        for size in (1, 2, 5, 48):
            for first in range(0, queries, size) if size > 5 else sorted({0, queries // 2, queries - 1}):
                part = Chunk(step, row, first, min(size, queries - first))
                library.tiles_threads(1 + first % 2)
                there = found[part.at : part.at + part.rows[0][1]]
                assert torch.equal(part.run(library, **options), there), (row, size, first)


LANES = torch.arange(9) / 9
SHAPED = [{"window": 40}, {"chunk": 48}, {"softcap": 2.0}, {"sinks": LANES - 0.2}, {"alibi": LANES / 4},
          {"window": 70, "softcap": 3.0, "sinks": LANES, "alibi": LANES / 9}]  # fmt: skip


@pytest.mark.parametrize(("options", "queries", "block"), spread(SHAPED, [1, 2, 4], [8, 16, 64]))
def test_shaped_decode_attention(library, options, queries, block):
    rows = [(context, min(queries, context)) for context, _ in DECODE] + [(1100, queries), (40, 30)]
    step = Attended(rows, 64, torch.float32, block, (9, 3))
    wanted = step.wanted(**options)
    for row, (context, count) in enumerate(rows):  # blocks before the window are gone
        first = max(context - count - options.get("window", context) + 1, 0)
        first = max(first, (context - count) // options["chunk"] * options["chunk"]) if "chunk" in options else first
        step.tables[row, : first // block] = -(2**30)
    library.tiles_threads(2)
    check_rounded(step.run(library, **options), wanted, torch.float32)


@pytest.mark.parametrize(
    ("threads", "options", "rows"),
    spread(
        [1, 2],
        [{}, {"window": 1500}],
        [[(2500, 1)], [(3000, 2), (40, 1)], [(1500, 1)] * 3 + [(1025, 1), (1024, 1), (2048, 3)]],
    ),
)
def test_long_decode_attention(library, threads, options, rows):
    step = Attended(rows, 64, torch.float32, 16, (9, 3))
    library.tiles_threads(threads)
    check_rounded(step.run(library, **options), step.wanted(**options), torch.float32)


@pytest.mark.parametrize("queries", [1, 2, 40])
def test_bad_numbers_stay_in_their_row(library, queries):
    rows = [(100, queries), (90, queries), (110, queries), (64, queries)]
    step = Attended(rows, 64, torch.float32, 16, (9, 3))
    library.tiles_threads(1)
    good = step.run(library).unflatten(0, (4, queries))
    step.cache[step.slots_of(1)[20], 3 * 64 + 5] = float("nan")  # a value
    step.cache[step.slots_of(2)[70], 7] = float("inf")  # a key
    bad = step.run(library).unflatten(0, (4, queries))
    assert torch.equal(bad[[0, 3]], good[[0, 3]])
    assert bad[1, -1].isnan().any() and bad[2, -1].isnan().any()
