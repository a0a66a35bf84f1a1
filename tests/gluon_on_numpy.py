"""Gluon kernels run by numpy: what they compute, not how it lies in threads. Triton's interpreter has no Gluon.

Functions of a module run as plain Python with another `gl`: blocks are arrays of numpy, layouts are nothing, shared
memory that was not written and rows that were not copied are NaN, and the assembler of `inline_asm_elementwise` is
interpreted (the instructions in `_run`; registers of a thread are neighbours of the last dimension). What is
not seen here: layouts (a conversion that must cost nothing is checked when a kernel is compiled), and races.
"""

from __future__ import annotations

import itertools
import re
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

_LUT_AND_OR = 0xEA  # (a & b) | c


def _plain(value):
    return value.value if type(value).__name__ == "constexpr" else value


class Block(np.ndarray):
    """An array with the methods that kernels call; bfloat16 is float32 with the numbers of that type."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return _converted(self, dtype)

    def permute(self, order):
        return self.transpose(order)


def block(values) -> Block:
    return np.asarray(values).view(Block)


def _converted(values, dtype):
    name = str(dtype)
    if name in ("bf16", "bfloat16"):
        return block(torch.from_numpy(np.array(values, np.float32)).bfloat16().float().numpy())
    return block(np.asarray(values).astype({"fp32": np.float32, "int64": np.int64, "int32": np.int32}[name]))


class Kind(str):
    @property
    def primitive_bitwidth(self):
        return 16 if self == "bf16" else 32


class Pointer:
    def __init__(self, tensor: torch.Tensor, at=0):
        self.tensor, self.at = tensor, np.asarray(at)
        self.dtype = SimpleNamespace(element_ty=Kind("bf16" if tensor.dtype is torch.bfloat16 else "fp32"))

    def __add__(self, more):
        return Pointer(self.tensor, self.at + np.asarray(more))

    def read(self, mask=None, other=np.nan) -> Block:
        flat = self.tensor.view(-1)
        values = (flat.float() if flat.is_floating_point() else flat).numpy()
        mask = np.ones_like(self.at, bool) if mask is None else np.asarray(mask)
        at, mask = np.broadcast_arrays(self.at, mask)
        assert ((at >= 0) & (at < flat.numel()))[mask].all(), "read outside"
        return block(np.where(mask, values[np.where(mask, at, 0)], np.asarray(other).astype(values.dtype)))

    def write(self, values, mask):
        at, mask, values = np.broadcast_arrays(self.at, np.asarray(mask), np.asarray(values))
        flat = self.tensor.view(-1)
        assert ((at >= 0) & (at < flat.numel()))[mask].all(), "written outside"
        assert len(np.unique(at[mask])) == mask.sum(), "written twice"
        flat[torch.from_numpy(at[mask].astype(np.int64))] = torch.from_numpy(values[mask].astype(np.float32)).to(
            flat.dtype
        )


class Descriptor:
    """Of a matrix, for loads of tiles by TMA: zeros past its end. Codes are numbers, whichever type they have."""

    def __init__(self, tensor: torch.Tensor):
        self.array = tensor.float().numpy()
        self.dtype = "int8" if tensor.dtype is torch.int8 else None

    def copy(self, at, to):
        row, column = (int(i) for i in at)
        height, width = to.shape
        piece = self.array[row : row + height, column : column + width]
        to.array[...] = np.pad(piece, ((0, height - piece.shape[0]), (0, width - piece.shape[1])))


class Shared:
    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def index(self, i):
        return Shared(self.array[int(i)])

    def slice(self, start, size, dim):
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + size),)])

    def permute(self, order):
        return Shared(self.array.transpose(order))


# --- assembler


def _numbers(bits):
    """Both bfloat16 of a register, [.., 2]."""
    halves = np.stack((bits & 0xFFFF, bits >> 16), -1).astype(np.uint32)
    return (halves << 16).view(np.float32)


def _product(a, b):
    product = torch.from_numpy((_numbers(a) * _numbers(b)).astype(np.float32)).bfloat16()
    halves = product.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << 16


def _permuted(a, b, selector):
    sources = [a >> (8 * i) & 0xFF for i in range(4)] + [b >> (8 * i) & 0xFF for i in range(4)]
    result = np.zeros_like(a)
    for i in range(4):
        chosen = int(selector) >> (4 * i) & 15
        assert chosen < 8, "signs are not spread here"
        result = result | sources[chosen] << np.uint32(8 * i)
    return result


def _run(text: str, registers: dict[str, np.ndarray], shape) -> None:
    """Lines of PTX, one instruction each, on registers of 32 bits."""

    def value(name):
        if name in registers:
            return registers[name]
        return np.full(shape, int(name, 0), np.uint32)

    for line in text.splitlines():
        found = re.fullmatch(r"\s*([\w.]+) (.*);\s*", line)
        if not found or found[1] == ".reg":
            assert found or line.strip() in ("{", "}", ""), line
            continue
        name, (to, *rest) = found[1], (part.strip() for part in found[2].split(","))
        given = [value(part) for part in rest]
        if name == "and.b32":
            registers[to] = given[0] & given[1]
        elif name == "shl.b32":
            registers[to] = given[0] << given[1]
        elif name == "shr.b32":
            registers[to] = given[0] >> given[1]
        elif name == "mul.lo.u32":
            registers[to] = given[0] * given[1]
        elif name == "lop3.b32":
            assert int(rest[3], 0) == _LUT_AND_OR
            registers[to] = given[0] & given[1] | given[2]
        elif name == "prmt.b32":
            registers[to] = _permuted(given[0], given[1], int(rest[2], 0))
        elif name == "mul.bf16x2":
            registers[to] = _product(given[0], given[1])
        else:
            raise NotImplementedError(line)


_ON_FLOATS = {
    "mul.f32": np.multiply, "add.f32": np.add, "ex2.approx.ftz.f32": np.exp2,
    "rcp.approx.ftz.f32": lambda x: np.float32(1) / x,
}  # fmt: skip


def _run_on_floats(text: str, registers: dict[str, np.ndarray]) -> None:
    """As `_run`, on registers of float32."""
    for line in text.splitlines():
        found = re.fullmatch(r"\s*([\w.]+) (.*);\s*", line)
        if not found or found[1] == ".reg":
            assert found or line.strip() in ("{", "}", ""), line
            continue
        to, *given = (part.strip() for part in found[2].split(","))
        values = [registers[x] if x in registers else np.uint32(int(x[2:], 16)).view(np.float32) for x in given]
        registers[to] = _ON_FLOATS[found[1]](*values)


def inline_asm_elementwise(text, constraints, args, *, dtype, is_pure, pack):
    """Of int32, to bfloat16; or of float32."""
    if constraints == "=f,f":
        registers = {"$1": np.asarray(args[0], np.float32)}
        _run_on_floats(text, registers)
        return block(registers["$0"])
    args = [np.asarray(arg).astype(np.int64).astype(np.uint32) for arg in np.broadcast_arrays(*args)]
    shape = args[0].shape
    assert is_pure and shape[-1] % pack == 0 and all(str(kind) in ("bf16", "bfloat16") for kind in dtype)
    outputs = len(dtype) * pack // 2
    assert constraints.count("=") == outputs and constraints.count(",") + 1 == outputs + pack * len(args)
    registers, lanes = {}, (*shape[:-1], shape[-1] // pack)
    for i, arg in enumerate(args):
        for j in range(pack):
            registers[f"${outputs + i * pack + j}"] = arg.reshape(*lanes, pack)[..., j]
    _run(text, registers, lanes)
    results = []
    for i in range(len(dtype)):
        words = [_numbers(registers[f"${i * pack // 2 + j}"]) for j in range(pack // 2)]
        results.append(block(np.concatenate(words, -1).reshape(shape)))
    return results


# --- gl


def _multiplied(left, right, acc, *, is_async):
    left = left.array if isinstance(left, Shared) else left
    return block(acc + (np.asarray(left, np.float64) @ np.asarray(right.array, np.float64)).astype(np.float32))


def _waited(num, *, deps):
    return deps if len(deps) > 1 else deps[0]


_BARRIERS = SimpleNamespace(  # copies are over at once
    MBarrierLayout=lambda: None, init=lambda at, count: None, expect=lambda at, size: None,
    wait=lambda at, phase: None, invalidate=lambda at: None,
)  # fmt: skip


def _copied(to, source, mask):
    to.array[...] = source.read(mask)


def _language(program):
    layout = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        program_id=lambda axis: program[axis], static_range=range, constexpr=_plain, load=_load, store=_store,
        arange=lambda low, high, layout=None: block(np.arange(low, high)),
        zeros=lambda shape, dtype, layout=None: block(np.zeros(shape, np.float32)),
        where=lambda *given: block(np.where(*given)), minimum=lambda a, b: block(np.minimum(a, b)),
        maximum=lambda a, b: block(np.maximum(a, b)), exp=lambda x: block(np.exp(x)),
        join=lambda a, b: block(np.stack((a, b), -1)), split=lambda x: (x[..., 0], x[..., 1]),
        convert_layout=lambda x, to, assert_trivial=False: x, inline_asm_elementwise=inline_asm_elementwise,
        allocate_shared_memory=lambda dtype, shape, kind: Shared(np.full(shape, np.nan, np.float32)),
        NVMMADistributedLayout=layout, NVMMASharedLayout=layout, DotOperandLayout=layout, BlockedLayout=layout,
        SliceLayout=layout, float32="fp32", int64="int64", int32="int32", int8="int8", bfloat16="bf16",
        num_warps=lambda: 8, assume=lambda _: None, reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.transpose(order),
    )  # fmt: skip


def _load(at, mask=None, other=0, cache_modifier=""):
    return at.read(mask, other)


def _store(at, values, mask):
    at.write(values, mask)


def runner(module, name: str):
    """The kernel `name` of a module, to be called with a grid, its tensors and numbers in order, and its constants."""

    names = dict(vars(module))

    def run(grid, *given, **constants):
        for program in itertools.product(*map(range, grid)):
            scope = {key: _plain(value) for key, value in names.items()}
            scope |= {
                "gl": _language(program), "warpgroup_mma": _multiplied, "warpgroup_mma_wait": _waited,
                "fence_async_shared": lambda: None, "_synchronize": lambda: None, "mbarrier": _BARRIERS,
                "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
                "load_tile": lambda source, at, barrier, to: source.copy(at, to),
                "_copy": _copied, "async_copy": SimpleNamespace(commit_group=lambda: None, wait_group=lambda n: None),
            }  # fmt: skip
            for key, value in list(scope.items()):
                inner = getattr(value, "fn", None)
                if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
                    scope[key] = FunctionType(inner.__code__, scope, key, inner.__defaults__)
            with np.errstate(invalid="ignore", over="ignore"):
                scope[name](*(Pointer(x) if isinstance(x, torch.Tensor) else x for x in given), **constants)

    return run
