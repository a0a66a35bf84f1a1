"""Calls of the compiled kernels that must be refused, each beside the same call as it should be.

Run as a program (`python -m tests.refused_calls`): without a check a call ends the process by a signal, or writes where
nothing is its own. A function of this module makes one call of the library's function of the same name, rightly unless
it is told otherwise; WRONG lists what to tell it. Prints one line per refusal, and "all refused" in the end.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.ops.blocks import BlockParts, StepTurn, Weights
from quire.ops.cpu.block import BlocksCall, NativeCache, NativeStep
from quire.ops.cpu.low_rank import LowRankWork, NativeSlots, PieceWork
from quire.ops.cpu.moe_forms import MatrixWork, MoeWork, matrix_work
from quire.ops.cpu.native import CHECKED, AttentionWork, DrawWork, KernelError, Segment, TextsWork, kernels
from quire.ops.cpu.rank_sums import NativeSum, memory_bytes
from quire.ops.few import NormRule
from quire.ops.lora import AdapterRows, LowRank, LowRankPiece
from quire.ops.qkv import QkvPrep

TOKENS, HEADS, KV, SIZE, BLOCK, WIDTH = 3, 4, 2, 16, 8, 32
Q8Z, B16, B32 = 5, 6, 7
HUGE, LONG = 10**9, 1 << 62
found_library = kernels()
assert found_library is not None, "no compiled kernels"
library = found_library


def step_work(held: list[Tensor], table: int = 0, slot: int = 0, context: int = TOKENS, end: int = TOKENS) -> Any:
    held += [torch.tensor([[table]], dtype=torch.int32), torch.tensor([0, end], dtype=torch.int32),
             torch.tensor([context], dtype=torch.int32), torch.arange(TOKENS) + slot]  # fmt: skip
    work = AttentionWork()
    work.tables, work.query_starts, work.contexts, work.slots = (tensor.data_ptr() for tensor in held[-4:])
    work.tokens, work.rows, work.table_stride, work.block_size = TOKENS, 1, 1, BLOCK
    return work


def qc_attend(arrays: dict[str, int] | None = None, **over: Any) -> None:
    held: list[Tensor] = []
    work = step_work(held, **(arrays or {}))
    held += [torch.randn(TOKENS, (HEADS + 2 * KV) * SIZE), torch.zeros(TOKENS, HEADS * SIZE),
             torch.zeros(BLOCK, 2 * KV * SIZE), torch.ones(TOKENS, SIZE), torch.zeros(TOKENS, SIZE)]  # fmt: skip
    work.qkv, work.out, work.cache, work.cos, work.sin = (tensor.data_ptr() for tensor in held[-5:])
    work.qkv_stride, work.cache_stride, work.cache_slots = (HEADS + 2 * KV) * SIZE, 2 * KV * SIZE, BLOCK
    work.heads, work.kv_heads, work.size, work.turned, work.scale = HEADS, KV, SIZE, SIZE, 0.25
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_attend(ctypes.byref(work))
    assert held[5].isfinite().all()


def qc_run_blocks(
    heads: int = HEADS, kv: int = KV, turned: int = SIZE, ffn: int = 24, up: int = 48, o: int = HEADS * SIZE,
    act: int = 0, slots: int = BLOCK, which: int = 0, adapter: int = 1, rank: int = 4, stop: int = WIDTH,
    pieces: int = 1, ranks: int = 1, **arrays: int,
) -> None:  # fmt: skip
    held: list[Tensor] = []
    step = NativeStep()
    step.work = step_work(held, **arrays)
    reduce = rank_sum(held)
    reduce.work.ranks = ranks
    shapes = (((HEADS + 2 * KV) * SIZE, WIDTH), (WIDTH, o), (up, WIDTH), (WIDTH, ffn))
    qkv, back, wide, down = (Weights(torch.randn(shape) / 8, None) for shape in shapes)
    norm = NormRule(torch.ones(WIDTH), 1e-5, 0.0, False)
    prep = QkvPrep(heads, kv, None, None, 0.0, 0.0, False, None, None, False)
    cache = NativeCache()
    cache.rows = torch.zeros(BLOCK, 2 * KV * SIZE)[:slots]
    low = LowRank(2)
    low.put(1, (LowRankPiece(0, WIDTH, torch.randn(4, WIDTH), torch.randn(WIDTH, 4), 1.0),))
    empty = LowRank(2)
    lows = (empty, empty, low, empty)
    parts = BlockParts((qkv, back, wide, down), (norm, norm), prep, cache, 0.25, 0.0, None, None, "named", lows, reduce)
    call = BlocksCall(library, {"named": act}, [parts], [0], torch.float32, TOKENS)
    call._which[0] = which
    assert isinstance(low.form, NativeSlots)
    works, _ = low.form._alive[0]
    works[0].rank, works[0].stop, low.form._entries[0].count = rank, stop, pieces
    rows = AdapterRows(torch.tensor([0, 1, adapter], dtype=torch.int32))
    turn = StepTurn(step, torch.ones(TOKENS, 1, turned), torch.zeros(TOKENS, 1, turned))
    done = call(torch.randn(TOKENS, WIDTH), None, [turn], rows)
    assert done is not None and done[1].isfinite().all()


def rank_sum(held: list[Tensor]) -> NativeSum:
    """Of one rank."""
    size = memory_bytes(1, 64)
    held.append(torch.zeros(size + 128, dtype=torch.uint8))
    memory = held[-1][-held[-1].data_ptr() % 128 :][:size]
    return NativeSum(library, memory, 0, 1, lambda x: x, spin_us=0, patience_s=0.01)


def qc_sum_ranks(
    count: int = 40, dtype: int = 0, memory: int | None = 0, missing: str = "", **over: int
) -> None:  # fmt: skip
    held: list[Tensor] = []
    x, work = torch.ones(40), rank_sum(held).work
    work.memory = None if memory is None else work.memory + memory
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_sum_ranks(
        None if missing == "ranks" else ctypes.addressof(work), None if missing == "x" else x.data_ptr(), count, dtype
    )
    assert (x == 1).all()


def qc_run_moe(
    index: int = 1, top_k: int = 2, ffn: int = 24, up_rows: int = 48, act: int = 0, count: int = 4, **over: Any
) -> None:
    held: list[Any] = []
    own = [[torch.randn(shape) for _ in range(count)] for shape in ((up_rows, WIDTH), (WIDTH, ffn))]
    arrays = [(MatrixWork * count)(*(matrix_work(Weights(made, None), held) for made in side)) for side in own]
    x, weights, out = torch.randn(TOKENS, WIDTH), torch.ones(TOKENS, 2), torch.zeros(TOKENS, WIDTH)
    chosen = torch.tensor([[0, index]] * TOKENS)
    work = MoeWork(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), x.data_ptr(), weights.data_ptr(),
                   chosen.data_ptr(), None, out.data_ptr(), TOKENS, count, top_k, act, 0, 0.0, 0.0)  # fmt: skip
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_run_moe(ctypes.byref(work))
    assert out.isfinite().all()


def qc_linear_packed(
    kind: int = Q8Z, width: int = WIDTH, count: int = 1, m: int = 1, rows: int = 16, x_stride: int = WIDTH,
    out_stride: int = 16, dtype: int = 0, other: int | None = None, missing: str = "",
) -> None:  # fmt: skip
    x, out = torch.randn(2, WIDTH), torch.zeros(2, 16)
    data = torch.zeros(library.qc_packed_bytes(Q8Z, 16, WIDTH), dtype=torch.uint8)
    own = None if missing == "data" else data.data_ptr()
    both = [Segment(kind, rows, own), *([] if other is None else [Segment(other, 0, own)])]
    segments = (Segment * len(both))(*both)
    at = None if missing == "segments" else ctypes.addressof(segments)
    library.qc_linear_packed(
        None if missing == "x" else x.data_ptr(), x_stride, m, width, at, count + (other is not None), None,
        None if missing == "out" else out.data_ptr(), out_stride, dtype,
    )  # fmt: skip


def qc_linear(
    m: int = 2, n: int = 8, k: int = WIDTH, x_stride: int = WIDTH, weight_stride: int = WIDTH, out_stride: int = 8,
    dtype: int = 0, missing: str = "",
) -> None:  # fmt: skip
    made = {"x": torch.randn(2, WIDTH), "weight": torch.randn(8, WIDTH), "out": torch.zeros(2, 8)}
    x, weight, out = (None if name == missing else tensor.data_ptr() for name, tensor in made.items())
    library.qc_linear(x, x_stride, weight, weight_stride, None, out, out_stride, m, n, k, dtype)


def qc_add_low_rank(
    m: int = 2, n: int = 8, k: int = WIDTH, x_stride: int = WIDTH, y_stride: int = 8, num_slots: int = 1, slot: int = 1,
    count: int = 1, start: int = 2, stop: int = 6, rank: int = 4, stored: int = 0, dtype: int = 0, missing: str = "",
) -> None:  # fmt: skip
    made = {"x": torch.randn(2, WIDTH), "slots": torch.tensor([0, slot], dtype=torch.int32), "y": torch.zeros(2, 8)}
    panels = {"a": torch.randn(1, WIDTH, 16), "b": torch.randn(1, 4, 32)}
    a, b = (None if name == missing else tensor.data_ptr() for name, tensor in panels.items())
    piece = PieceWork(a, b, start, stop, rank, 1.0, stored)
    low = LowRankWork(None if missing == "pieces" else ctypes.addressof(piece), count)
    x, slots, y = (None if name == missing else tensor.data_ptr() for name, tensor in made.items())
    library.qc_add_low_rank(
        x, x_stride, slots, None if missing == "low" else ctypes.addressof(low), num_slots, y, y_stride, m, n, k, dtype
    )
    assert made["y"].isfinite().all()


def qc_rms_norm(
    rows: int = 2, width: int = WIDTH, x_stride: int = WIDTH, dtype: int = 0, delta: bool = False, missing: str = ""
) -> None:
    made = {"x": torch.randn(2, WIDTH), "weight": torch.ones(WIDTH), "out": torch.zeros(2, WIDTH)}
    x, weight, out = (None if name == missing else tensor.data_ptr() for name, tensor in made.items())
    more = made["x"].data_ptr() if delta else None
    library.qc_rms_norm(x, x_stride, more, weight, None, out, rows, width, 1e-5, 0.0, 0, dtype)


def qc_gated(act: int = 0, dtype: int = 0, rows: int = 2, width: int = 16, stride: int = 32, missing: str = "") -> None:
    x, out = torch.randn(2, 32), torch.zeros(2, 16)
    library.qc_gated(
        act, None if missing == "x" else x.data_ptr(), stride, None if missing == "out" else out.data_ptr(), rows,
        width, dtype,
    )  # fmt: skip


def qc_argmax(rows: int = 2, width: int = 40, stride: int = 40, dtype: int = 0, missing: str = "") -> None:
    x, index = torch.randn(2, 40), torch.zeros(2, dtype=torch.int64)
    at = None if missing == "index" else index.data_ptr()
    library.qc_argmax(None if missing == "x" else x.data_ptr(), stride, rows, width, at, dtype)


def qc_draw_tokens(missing: str = "", **over: Any) -> None:
    floats = {name: torch.ones(2) for name in ("temperature", "floors", "top_p", "scores")}
    whole = {name: torch.ones(2, dtype=torch.int64) for name in ("top_k", "seeds", "positions", "tokens")}
    made = {"logits": torch.randn(2, 40), **floats, **whole}
    work = DrawWork(stride=40, rows=2, width=40, dtype=0)
    for name, tensor in made.items():
        setattr(work, name, None if name == missing else tensor.data_ptr())
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_draw_tokens(ctypes.byref(work))


def qc_log_softmax(rows: int = 2, width: int = 40, stride: int = 40, dtype: int = 0, missing: str = "") -> None:
    x, out = torch.randn(2, 40), torch.zeros(2, 40)
    at = None if missing == "out" else out.data_ptr()
    library.qc_log_softmax(None if missing == "x" else x.data_ptr(), stride, rows, width, at, dtype)


def qc_top(rows: int = 2, width: int = 40, k: int = 5, chosen: int = 3, missing: str = "") -> None:
    ids, ranks = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    made = {"x": torch.randn(2, 40), "chosen": torch.tensor([0, chosen]), "values": torch.zeros(2, 6), "ids": ids,
            "ranks": ranks}  # fmt: skip
    at = {name: None if name == missing else tensor.data_ptr() for name, tensor in made.items()}
    library.qc_top(at["x"], rows, width, at["chosen"], k, at["values"], at["ids"], at["ranks"])


def qc_allow(
    row: int = 1, num_rows: int = 2, width: int = 40, stride: int = 40, count: int = 1, words: int = 2,
    missing: str = "",
) -> None:  # fmt: skip
    bits = torch.zeros(1, 2, dtype=torch.int32)
    made = {"x": torch.randn(2, 40), "rows": torch.tensor([row]), "bits": bits}
    x, rows, allowed = (None if name == missing else tensor.data_ptr() for name, tensor in made.items())
    library.qc_allow(x, stride, num_rows, width, rows, count, allowed, words)


def qc_pack(type_id: int = 8, rows: int = 16, width: int = WIDTH, missing: str = "") -> None:
    stored, out = torch.zeros(16 * 34, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    to = None if missing == "out" else out.data_ptr()
    library.qc_pack(type_id, None if missing == "stored" else stored.data_ptr(), rows, width, to)


def qc_pack_float(kind: int = Q8Z, dtype: int = 0, rows: int = 16, width: int = WIDTH, missing: str = "") -> None:
    given, out = torch.randn(16, WIDTH), torch.zeros(1024, dtype=torch.uint8)
    to = None if missing == "out" else out.data_ptr()
    library.qc_pack_float(kind, None if missing == "from" else given.data_ptr(), dtype, rows, width, to)


def qc_lay_panels(kind: int = B32, rows: int = 16, width: int = WIDTH, missing: str = "") -> None:
    weight = torch.zeros(16, WIDTH)
    library.qc_lay_panels(kind, None if missing else weight.data_ptr(), rows, width, 0)


def qc_attend_texts(query_len: int = 2, key_len: int = 2, missing: str = "", **over: Any) -> None:
    held = [
        torch.randn(TOKENS, HEADS * SIZE),
        *torch.randn(2, TOKENS, KV * SIZE).unbind(),
        torch.zeros(TOKENS, HEADS * SIZE),
    ]
    lens = [torch.tensor([1, query_len]), torch.tensor([1, key_len])]
    work = TextsWork(texts=2, queries=TOKENS, keys=TOKENS, heads=HEADS, kv_heads=KV, size=SIZE, scale=0.25)
    work.q_stride, work.k_stride, work.v_stride = HEADS * SIZE, KV * SIZE, KV * SIZE
    for name, tensor in zip(("q", "k", "v", "out", "query_lens", "key_lens"), (*held, *lens), strict=True):
        setattr(work, name, None if name == missing else tensor.data_ptr())
    for name, value in over.items():
        setattr(work, name, value)
    library.qc_attend_texts(ctypes.byref(work))
    assert held[3].isfinite().all()


def qc_unpack_rows(
    kind: int = Q8Z, rows: int = 16, width: int = WIDTH, index: int = 15, count: int = 1, dtype: int = 0,
    missing: str = "",
) -> None:  # fmt: skip
    made = {"packed": torch.zeros(1024, dtype=torch.uint8), "index": torch.tensor([index]), "out": torch.zeros(1, 32)}
    packed, wanted, out = (None if name == missing else tensor.data_ptr() for name, tensor in made.items())
    library.qc_unpack_rows(kind, packed, rows, width, wanted, count, out, dtype)


def qc_set_threads(count: int = 1) -> None:
    library.qc_set_threads(count)


def _each(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [{name: value} for name, every in values.items() for value in every]


COUNTS = (-1, 1 << 31, LONG, -LONG)
WRONG: dict[Any, list[dict[str, Any]]] = {
    qc_attend: [
        *_each(
            turned=(65536, 18, 15, -2), kv_heads=(8, 3, 0, -1), heads=(0, -4, 1 << 30), size=(0, 100_000, -16),
            block_size=(0, -8, LONG), cache_stride=(8, -1, LONG), qkv_stride=(8, -1, LONG), dtype=(9, -1, 3),
            cache_dtype=(9, 3, -1), turn_dtype=(1,), tokens=COUNTS, rows=COUNTS, table_stride=(-1, 0, LONG),
            window=(-1,), chunk=(-7,), cache_slots=(0, 2, -1), qkv=(None,), out=(None,), cache=(None,), slots=(None,),
            tables=(None,), query_starts=(None,), contexts=(None,), sin=(None,),
            arrays=({"table": HUGE}, {"table": -1}, {"table": 1}, {"slot": HUGE}, {"slot": 6}, {"context": HUGE},
                    {"context": 2}, {"context": -1}, {"end": HUGE}, {"end": -1}, {"end": 4}),
        ),
    ],
    qc_run_blocks: _each(
        turned=(65536, 18), kv=(8, 1), heads=(6,), ffn=(96,), up=(40,), o=(48,), act=(77, -1), slots=(0, 2),
        which=(1, -1, HUGE), adapter=(3, -1, HUGE), rank=(0, -1, LONG), stop=(49, 0, LONG), pieces=(-1, LONG),
        table=(HUGE, -1, 1), slot=(HUGE, 6), context=(HUGE, 2), end=(HUGE, -1), ranks=(0, -1, 2, HUGE),
    ),
    qc_sum_ranks: _each(
        count=(-1, LONG, -LONG), dtype=(7, -1, 3), memory=(None, 64, 4), missing=("ranks", "x"), rank=(1, -1, HUGE),
        ranks=(0, -1, 2, 1025, HUGE), bytes=(0, -1, 128, 255, LONG, -LONG), spin_us=(-1,), patience_ms=(-1,),
    ),
    qc_run_moe: _each(
        index=(HUGE, -3, 4), top_k=(0, 5, -1), ffn=(96,), up_rows=(40,), act=(77,), tokens=COUNTS, experts=(0, -1),
        dtype=(7,), x=(None,), up=(None,), down=(None,), weights=(None,), out=(None,),
    ),
    qc_linear_packed: [
        *_each(
            kind=(99, -1), width=(31, 0, -32, LONG), count=(0, -1), m=COUNTS, rows=(-1, LONG), dtype=(7, -1),
            other=(B16,), missing=("data", "segments", "x", "out"),
        ),
        {"m": 2, "x_stride": -WIDTH}, {"m": 2, "x_stride": LONG}, {"m": 2, "out_stride": 8},
    ],
    qc_linear: _each(
        m=COUNTS, n=COUNTS, k=(0, *COUNTS), x_stride=(-1, LONG), weight_stride=(-1, LONG), out_stride=(0, 7, -8, LONG),
        dtype=(7, -1), missing=("x", "weight", "out"),
    ),
    qc_add_low_rank: _each(
        m=COUNTS, n=(0, 5, *COUNTS), k=(0, *COUNTS), x_stride=(-1, LONG), y_stride=(0, 7, -8, LONG),
        num_slots=(0, *COUNTS), slot=(2, -1, HUGE), count=COUNTS, start=(-1, 6, LONG), stop=(2, 9, LONG, -1),
        rank=(0, *COUNTS), stored=(3, -1), dtype=(7, -1), missing=("x", "slots", "y", "a", "b", "pieces", "low"),
    ),
    qc_rms_norm: _each(
        rows=COUNTS, width=(0, *COUNTS), x_stride=(-1, LONG), dtype=(7, -1), missing=("x", "weight", "out"),
        delta=(True,),
    ),
    qc_gated: _each(
        act=(99, -1), dtype=(7, -1), rows=COUNTS, width=COUNTS, stride=(-1, LONG), missing=("x", "out")
    ),
    qc_argmax: _each(
        rows=COUNTS, width=(0, *COUNTS), stride=(-1, LONG), dtype=(7, -1), missing=("x", "index")
    ),
    qc_draw_tokens: _each(
        rows=COUNTS, width=(0, *COUNTS), stride=(-1, LONG), dtype=(7, -1),
        missing=("logits", "temperature", "floors", "top_p", "top_k", "seeds", "positions", "tokens", "scores"),
    ),
    qc_log_softmax: _each(
        rows=COUNTS, width=(0, *COUNTS), stride=(-1, LONG), dtype=(7, -1), missing=("x", "out")
    ),
    qc_top: _each(
        rows=COUNTS, width=(0, *COUNTS), k=(-1, 41, LONG), chosen=(40, -1, HUGE, LONG),
        missing=("x", "chosen", "values", "ids", "ranks"),
    ),
    qc_allow: _each(
        row=(2, -1, HUGE, LONG), num_rows=(0, 1, *COUNTS), width=(0, *COUNTS), stride=(39, -1, LONG), count=COUNTS,
        words=COUNTS, missing=("x", "rows", "bits"),
    ),
    qc_pack: _each(type_id=(10, -1, 99), rows=COUNTS, width=(0, 31, -32, *COUNTS), missing=("stored", "out")),
    qc_pack_float: _each(
        kind=(0 - 1, 1, B16, B32, 99), dtype=(7, -1, 3), rows=COUNTS, width=(0, 31, -32, *COUNTS),
        missing=("from", "out"),
    ),
    qc_lay_panels: _each(kind=(-1, 1, 8), rows=(15, -16, *COUNTS), width=(0, 31, -32, *COUNTS), missing=("weight",)),
    qc_unpack_rows: _each(
        kind=(-1, 99), rows=COUNTS, width=(0, 31, -32, *COUNTS), index=(16, -1, HUGE, LONG), count=COUNTS,
        dtype=(7, -1), missing=("packed", "index", "out"),
    ),
    qc_attend_texts: _each(
        query_len=(1, 3, -1, LONG), key_len=(0, 1, 3, -1, LONG), texts=(1, *COUNTS), queries=(2, 4, *COUNTS),
        keys=(2, 4, *COUNTS), q_stride=(-1, LONG), k_stride=(-1, LONG), v_stride=(-1, LONG), heads=(0, -1, 3, 1 << 20),
        kv_heads=(0, -1, 3), size=(0, 8, 24, 272, -16), window=(-1,), scale=(0.0, -1.0, float("nan")),
        missing=("q", "k", "v", "out", "query_lens", "key_lens"),
    ),
    qc_set_threads: _each(count=(HUGE, 1025)),
}  # fmt: skip


def main() -> None:
    for call, wrong in WRONG.items():
        call()
        for over in wrong:
            print(call.__name__, over, flush=True)
            try:
                call(**over)
            except KernelError as refused:
                print("  refused:", refused, flush=True)
            else:
                raise SystemExit(f"{call.__name__} {over} was computed")
        call()
    left = set(CHECKED) - {call.__name__ for call in WRONG}
    print("all refused" if not left else f"no calls of {sorted(left)}")


if __name__ == "__main__":
    main()
