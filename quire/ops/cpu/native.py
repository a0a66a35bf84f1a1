"""The compiled CPU kernels (csrc/cpu) as Python functions over addresses and sizes.

`kernels()` loads the library once, checks its version, chooses the instruction set, and returns None if there is
nothing to load or the machine has none of the instruction sets it was built for. The library's C functions are methods;
csrc/cpu/quire_cpu.h has their signatures. Must not know: modules, models, configuration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base import env, native

ABI = 6
BY_NAME = frozenset({"avx512bf16"})  # only on request: slower than avx512 where it was measured
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_DTYPES = {**DTYPES, torch.int8: 3}  # int8: with a scale for each token and head
WRONG = {  # qc_wrong
    -1: "an unknown dtype",
    -2: "a number of query heads that is not a multiple of the key heads",
    -3: "a head size outside of 1 to 256",
    -4: "a rotary embedding that is not pairs of values within a head",
    -5: "rows too short for their heads",
    -6: "inconsistent counts of tokens, rows or keys",
    -7: "a matrix with an invalid number of rows, width or kind",
    -8: "an unknown activation",
    -9: "an invalid selection of experts",
    -10: "a null pointer",
    -11: "a slot, block, row, token or turn that is out of range",
    -12: "inconsistent rows, widths or strides",
    -13: "work before an instruction set was chosen",
    -14: "more work than there is memory or threads for",
    -15: "an inconsistent group of ranks, two sums at once, or one after a sum that was given up",
    -16: "a rank that did not come to a sum in time",
    -17: "ranks that sum different sizes or dtypes at once",
}
_OF_RANK = frozenset({-14, -15, -16, -17})
_WHOLE = (c_int, c_int32, c_int64)
KINDS = {"Q4M": 0, "Q4Z": 1, "Q5M": 2, "Q5Z": 3, "Q6Z": 4, "Q8Z": 5, "B16": 6, "B32": 7}


class Segment(Structure):
    """Some rows of a fused matrix, all packed in the same format."""

    _fields_ = [("kind", c_int64), ("rows", c_int64), ("data", c_void_p)]


class AttentionWork(Structure):
    """One layer's attention in one step."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "qkv", "out", "cache", "q_weight", "k_weight", "cos", "sin", "sinks", "alibi", "slots", "tables",
            "query_starts", "contexts",
        )),
        *((name, c_int64) for name in (
            "tokens", "rows", "qkv_stride", "cache_stride", "cache_slots", "table_stride", "block_size",
        )),
        *((name, c_int32) for name in (
            "dtype", "cache_dtype", "turn_dtype", "heads", "kv_heads", "size", "turned", "window", "chunk", "pairs",
            "norm_each", "norm_wide",
        )),
        *((name, c_float) for name in ("eps", "offset", "scale", "softcap")),
    ]  # fmt: skip


class TextsWork(Structure):
    """Attention within texts that are read at once."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "out", "query_lens", "key_lens")),
        *((name, c_int64) for name in ("texts", "queries", "keys", "q_stride", "k_stride", "v_stride")),
        *((name, c_int32) for name in ("heads", "kv_heads", "size", "window")),
        ("scale", c_float),
    ]  # fmt: skip


class DrawWork(Structure):
    """Rows of logits, and the sampling parameters of each."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "logits", "temperature", "floors", "top_p", "top_k", "seeds", "positions", "tokens", "scores",
        )),
        *((name, c_int64) for name in ("stride", "rows", "width")),
        ("dtype", c_int32),
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "qc_abi": (c_int, ()),
    "qc_num_isas": (c_int, ()),
    "qc_isa_name": (c_char_p, (c_int,)),
    "qc_isa_usable": (c_int, (c_int,)),
    "qc_use_isa": (c_int, (c_char_p,)),
    "qc_isa": (c_char_p, ()),
    "qc_checksum": (c_uint64, (c_void_p, c_int64)),
    "qc_set_threads": (c_int, (c_int,)),
    "qc_threads": (c_int, ()),
    "qc_kind_of": (c_int, (c_int,)),
    "qc_packed_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "qc_pack": (c_int, (c_int, c_void_p, c_int64, c_int64, c_void_p)),
    "qc_pack_float": (c_int, (c_int, c_void_p, c_int, c_int64, c_int64, c_void_p)),
    "qc_lay_panels": (c_int, (c_int, c_void_p, c_int64, c_int64, c_int)),
    "qc_unpack_rows": (c_int, (c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int)),
    "qc_linear_packed": (
        c_int,
        (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int),
    ),
    "qc_linear": (
        c_int,
        (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int),
    ),
    "qc_rms_norm": (
        c_int,
        (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_int, c_int),
    ),
    "qc_gated": (c_int, (c_int, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int)),
    "qc_attend": (c_int, (POINTER(AttentionWork),)),
    "qc_attend_texts": (c_int, (POINTER(TextsWork),)),
    "qc_run_blocks": (
        c_int,
        (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 5),
    ),
    "qc_sum_ranks": (c_int, (c_void_p, c_void_p, c_int64, c_int)),
    "qc_add_low_rank": (
        c_int,
        (
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
            c_int64,
            c_int64,
            c_int64,
            c_int64,
            c_int,
        ),
    ),
    "qc_argmax": (c_int, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int)),
    "qc_run_moe": (c_int, (c_void_p,)),
    "qc_draw_tokens": (c_int, (POINTER(DrawWork),)),
    "qc_log_softmax": (c_int, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int)),
    "qc_top": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)),
    "qc_allow": (c_int, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64)),
}
# Functions without pointers, or without anything that could be invalid.
HARMLESS = frozenset(
    ("qc_abi", "qc_num_isas", "qc_isa_name", "qc_isa_usable", "qc_use_isa", "qc_isa", "qc_checksum", "qc_threads",
     "qc_kind_of", "qc_packed_bytes")
)  # fmt: skip
CHECKED = tuple(name for name in _FUNCTIONS if name not in HARMLESS)  # 0, or a number of WRONG


class KernelError(ValueError):
    """Kernels were called with inconsistent sizes, and did nothing. `is_of_rank`: nothing is wrong with what they were
    called with, but this rank has no memory, or is out of step with those that it sums with."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(what)
        self.is_of_rank = code in _OF_RANK


def kernels() -> ctypes.CDLL | None:
    """The library with an instruction set chosen, or None; then `why_not` says why."""
    path = native.library()
    return None if path is None else _loaded(path)


@cache
def opened(path: Path) -> ctypes.CDLL | str:
    """The library, or why it cannot be used, in words for a user."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as wrong:  # built for another architecture, or truncated
        return f"they cannot be loaded ({wrong}); `pip install` Quire again"
    if not all(hasattr(library, name) for name in _FUNCTIONS) or library.qc_abi() != ABI:
        return f"{path} belongs to another version of Quire; `pip install` this one again"
    return library


@cache
def _loaded(path: Path) -> ctypes.CDLL | None:
    library = opened(path)
    if isinstance(library, str):
        return None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name in CHECKED:
        getattr(library, name).errcheck = _done
    requested = env.CPU_KERNELS.get()
    if requested == "auto":
        better = [name for name in usable(library) if name not in BY_NAME]
        return library if better and library.qc_use_isa(better[-1].encode()) >= 0 else None
    if library.qc_use_isa(requested.encode()) < 0:
        raise env.VariableError(f"QUIRE_CPU_KERNELS={requested}: this machine can run {usable(library)}")
    return library


def _done(code: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if code:
        sizes = _numbers(function.argtypes, arguments)
        what = f"{function.__name__}: the CPU kernels were given {WRONG.get(code, code)}"
        raise KernelError(f"{what} ({sizes})" if sizes else what, code)
    return code


def _numbers(types: Sequence[Any], arguments: tuple[Any, ...]) -> str:
    """Sizes of a call, for an error: the arguments that are not addresses, and the numbers of a struct."""
    numbers = [str(value) for kind, value in zip(types, arguments, strict=True) if kind in _WHOLE]
    for work in (argument._obj for argument in arguments if hasattr(argument, "_obj")):  # of ctypes.byref
        fields = [name for name, kind in work._fields_ if kind in _WHOLE]
        numbers += [f"{name}={getattr(work, name)}" for name in fields]
    return ", ".join(numbers)


def usable(library: ctypes.CDLL) -> list[str]:
    """Names of the compiled instruction sets that this machine supports, the best last."""
    every = range(library.qc_num_isas())
    return [library.qc_isa_name(i).decode() for i in every if library.qc_isa_usable(i)]


def why_not() -> str:
    path = native.library()
    if path is None:
        return native.why_not()
    library = opened(path)
    return library if isinstance(library, str) else "this machine has none of the instruction sets they are built for"


def checksum(data: Tensor) -> int:
    """Checksum of contiguous uint8. Any change of one 8-byte word changes it. Needs the kernels."""
    library = kernels()
    assert library is not None and data.dtype is torch.uint8 and data.is_contiguous()
    result: int = library.qc_checksum(data.data_ptr(), data.numel())
    return result
