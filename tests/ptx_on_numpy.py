"""Compiled kernels run by numpy: the PTX of one kernel, threads of a program being the lanes of arrays.

What is seen here and not in gluon_on_numpy.py: layouts, that is what each thread has in its registers, where rows lie
in shared memory, and which of it a descriptor of `wgmma` means. Instructions are those that the kernels under test
have (`wgmma` of bfloat16, `mma` of both 16-bit kinds); an unknown one is an error. What is not seen: races (copies and
matmuls are done when they are asked for), and what the assembler and the GPU make of it. Branches must go the same way
in all threads of a program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

U64 = np.uint64
_WORD, _HALF = U64(0xFFFFFFFF), U64(0xFFFF)
_MASKS = {"64": ~U64(0), "32": _WORD, "16": _HALF}
_NOTHING = (
    "bar.", "wgmma.fence", "wgmma.commit", "wgmma.wait", "cp.async.commit", "cp.async.wait", "fence", "griddepcontrol",
)  # fmt: skip
_SIZES = {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "s32": np.int32}
_COMPARED: dict[str, Callable] = {
    "lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_LOGIC: dict[str, Callable] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_WHOLE: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    "div": lambda a, b: np.trunc(a / b).astype(np.int64),
}  # fmt: skip
_FLOAT: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "ex2": np.exp2, "neg": np.negative, "abs": np.abs, "rsqrt": lambda a: 1 / np.sqrt(a),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
}  # fmt: skip


class Memory:
    """Arrays at made-up addresses; what lies outside of them cannot be read or written."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """uint8 [n] -> its address."""
        self._arrays.append(array)
        return len(self._arrays) << 40

    def _place(self, at: int, size: int) -> tuple[np.ndarray, slice]:
        array, start = self._arrays[(at >> 40) - 1], at & ((1 << 40) - 1)
        assert start + size <= len(array), f"{size} bytes at {start} of {len(array)}"
        return array, slice(start, start + size)

    def read(self, at: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        """[lanes, size]"""
        out = np.zeros((len(at), size), np.uint8)
        for lane in np.nonzero(mask)[0]:
            array, place = self._place(int(at[lane]), size)
            out[lane] = array[place]
        return out

    def write(self, at: np.ndarray, data: np.ndarray, mask: np.ndarray) -> None:
        for lane in np.nonzero(mask)[0]:
            array, place = self._place(int(at[lane]), data.shape[1])
            array[place] = data[lane]


class _Within(Memory):
    """Shared memory: one array, from address 0 on."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def _place(self, at: int, size: int) -> tuple[np.ndarray, slice]:
        assert at + size <= len(self._array), f"{size} bytes at {at} of {len(self._array)}"
        return self._array, slice(at, at + size)


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32).astype(U64)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return floats((bits & _HALF) << U64(16))


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = bits_of(values)
    return np.where(np.isnan(values), U64(0x7FFF), (bits + U64(0x7FFF) + (bits >> U64(16) & U64(1))) >> U64(16))


def from_f16(bits: np.ndarray) -> np.ndarray:
    return (bits & _HALF).astype(np.uint16).view(np.float16).astype(np.float32)


def to_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16).astype(U64)


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    sign, exponent, rest = bits >> U64(7) & U64(1), (bits >> U64(3) & U64(15)).astype(int), (bits & U64(7)).astype(int)
    size = np.where(exponent > 0, np.ldexp(8.0 + rest, exponent - 10), np.ldexp(rest.astype(float), -9))
    size = np.where(bits & U64(0x7F) == U64(0x7F), np.nan, size)
    return (np.where(sign, -1, 1) * size).astype(np.float32)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; what is too large to the largest."""
    size = np.minimum(np.abs(values.astype(float)), 448.0)
    unit = np.maximum(np.frexp(size)[1], -5) - 4
    rounded = np.round(np.ldexp(size, -unit))  # 8 to 16 of its unit, less if it is a small one
    unit, rounded = np.where(rounded == 16, unit + 1, unit), np.where(rounded == 16, 8, rounded)
    code = np.where(rounded < 8, rounded, (unit + 9) * 8 + rounded)
    code = np.where(np.isnan(values), 0x7F, code).astype(int)
    return (code | np.signbit(values) << 7).astype(U64)


# two numbers of a register -> theirs in float32, and back
_PAIRS: dict[str, tuple[Callable, Callable]] = {"bf16": (from_bf16, to_bf16), "f16": (from_f16, to_f16)}


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and where labels stand among them."""
    body = text[text.index("\n{") + 2 : text.index("$L__func_end")]
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in re.split(r"[;\n]", re.sub(r"//[^\n]*", "", body)):
        line = line.strip().removeprefix("{").strip()
        if found := re.fullmatch(r"([\w$]+):", line):
            labels[found[1]] = len(code)
        elif line not in ("", "}") and not line.startswith("."):
            code.append(line)
    return code, labels


class Program:
    def __init__(
        self, threads: int, params: Sequence[int], memory: Memory, shared: int, place: tuple[int, ...]
    ) -> None:
        """`place`: its number in the grid; `shared`: bytes, which are NaN at first."""
        self._count, self._params, self._memory, self._place = threads, params, memory, place
        self._shared = np.full(shared, 0xFF, np.uint8)
        self._registers: dict[str, np.ndarray] = {}

    def run(self, code: Sequence[str], labels: Mapping[str, int]) -> None:
        at = 0
        while at < len(code):
            line = code[at]
            at += 1
            mask = np.ones(self._count, bool)
            if found := re.match(r"@(!?)(%p\d+)\s+(.*)", line):
                mask = (self._get(found[2]) != 0) != bool(found[1])
                line = found[3]
            name, *rest = line.replace("shared::cta", "shared", 1).split(maxsplit=1)  # as newer compilers say it
            if name == "ret":
                return
            if name.startswith("bra"):
                assert mask.all() or not mask.any(), "threads part"
                at = labels[rest[0]] if mask.all() else at
            elif not name.startswith(_NOTHING):
                self._step(name, [arg.strip() for arg in re.split(r",(?![^{]*\})", rest[0])], mask)

    def _get(self, name: str) -> np.ndarray:
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+U?", name):
            return np.full(self._count, int(name.rstrip("U"), 0) & ((1 << 64) - 1), U64)
        if name.startswith("0f"):
            return np.full(self._count, int(name[2:], 16), U64)
        if name == "%tid.x":
            return np.arange(self._count, dtype=U64)
        if name.startswith("%ctaid."):
            return np.full(self._count, self._place["xyz".index(name[-1])], U64)
        return np.zeros(self._count, U64) if name == "global_smem" else self._registers[name]

    def _put(self, name: str, value: np.ndarray, mask: np.ndarray, kind: str = "b64") -> None:
        value = value.astype(U64) if value.dtype == bool else value.view(U64)
        value = value & _MASKS[kind[-2:]]
        self._registers[name] = np.where(mask, value, self._registers.get(name, U64(0xDEADBEEF)))

    def _whole(self, name: str, kind: str) -> np.ndarray:
        value = self._get(name)
        if kind == "s32":
            return value.astype(np.uint32).view(np.int32).astype(np.int64)
        return (value & _MASKS[kind[-2:]]).view(np.int64)

    def _address(self, text: str) -> np.ndarray:
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        assert found, text
        return self._get(found[1]) + U64(int(found[2] or 0) & ((1 << 64) - 1))

    def _step(self, name: str, args: list[str], mask: np.ndarray) -> None:
        head, *_, kind = parts = name.split(".")
        if name.startswith("ld.param"):
            number = int(args[1].rstrip("]").rpartition("_")[2])
            self._put(args[0], np.full(self._count, self._params[number], U64), mask)
        elif head in ("ld", "st"):
            assert "global" in parts or "shared" in parts
            memory = self._memory if "global" in parts else _Within(self._shared)
            (self._load if head == "ld" else self._store)(args, kind, mask, memory)
        elif head == "atom":
            self._add_to(args, kind, mask)
        elif name.startswith("shfl.sync.bfly"):
            others = np.arange(self._count, dtype=U64) ^ self._get(args[2])
            self._put(args[0].partition("|")[0], self._get(args[1])[others.astype(int)], mask)
        elif re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", name):
            self._load_matrices(args, "trans" in parts)
        elif re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x[124]\.shared\.b16", name):
            self._store_matrices(args)
        elif head == "mma":
            self._multiply(name, args)
        elif name.startswith("cp.async"):
            self._copy(args, mask)
        elif head == "wgmma":
            self._matmul(name, args)
        elif head == "mov" and "{" in "".join(args):
            self._move_halves(args, mask)
        elif head == "mov":
            self._put(args[0], self._get(args[1]), mask, "b64" if kind == "pred" else kind)
        elif kind == "pred":
            self._put(args[0], _LOGIC[head](self._get(args[1]) != 0, self._get(args[2]) != 0), mask)
        elif head == "setp":
            given = [floats(self._get(arg)) if kind == "f32" else self._whole(arg, kind) for arg in args[1:]]
            self._put(args[0], _COMPARED[parts[1]](*given), mask)
        elif head == "selp":
            self._put(args[0], np.where(self._get(args[3]) != 0, self._get(args[1]), self._get(args[2])), mask, kind)
        elif head == "cvt":
            self._convert(parts, args, mask)
        elif kind.removesuffix("x2") in _PAIRS:
            self._put(args[0], self._in_halves(head, kind, args), mask)
        elif name == "min.NaN.xorsign.abs.f32":
            a, b = (floats(self._get(arg)) for arg in args[1:])
            self._put(args[0], bits_of(np.copysign(np.minimum(abs(a), abs(b)), a * np.sign(b))), mask)
        elif kind == "f32":
            with np.errstate(all="ignore"):
                self._put(args[0], bits_of(_FLOAT[head](*(floats(self._get(arg)) for arg in args[1:]))), mask)
        else:
            self._put(args[0], self._computed(name, parts, args), mask, "b64" if "wide" in parts else kind)

    def _in_halves(self, head: str, kind: str, args: list[str]) -> np.ndarray:
        """One number of 16 bits, or two."""
        opened, closed = _PAIRS[kind.removesuffix("x2")]
        with np.errstate(all="ignore"):
            halves = [
                closed(_FLOAT[head](*(opened(self._get(arg) >> U64(by)) for arg in args[1:])))
                for by in ((0, 16) if kind.endswith("x2") else (0,))
            ]
        return halves[0] if len(halves) == 1 else halves[0] | halves[1] << U64(16)

    def _computed(self, name: str, parts: list[str], args: list[str]) -> np.ndarray:
        """Whole numbers and bits."""
        head, kind = parts[0], parts[-1]
        if head in _LOGIC:
            return _LOGIC[head](self._get(args[1]), self._get(args[2]))
        if head == "shl":
            return self._get(args[1]) << self._get(args[2])
        if name == "prmt.b32":
            return self._permuted(*(self._get(arg) for arg in args[1:]))
        if name == "lop3.b32":
            a, b, c = (self._get(arg) & _WORD for arg in args[1:4])
            table, out = int(args[4], 0), np.zeros(self._count, U64)
            for i in range(8):
                if table >> i & 1:
                    out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return out
        if name == "neg.s32":
            return -self._whole(args[1], kind)
        if name == "bfe.s32":
            start, count = (int(arg) for arg in args[2:4])
            return self._whole(args[1], "s32") << (64 - start - count) >> (64 - count)
        if name == "bfe.u32":
            return self._get(args[1]) >> self._get(args[2]) & ((U64(1) << self._get(args[3])) - U64(1))
        a, b = (self._whole(arg, kind) for arg in args[1:3])
        if head == "shr":
            return a >> b
        if name in ("mul.hi.u32", "mul.hi.s32"):
            return a * b >> 32
        if head in ("mul", "mad") and parts[1] in ("wide", "lo"):
            return a * b if head == "mul" else a * b + self._get(args[3]).view(np.int64)
        if head in _WHOLE:
            return _WHOLE[head](a, b)
        raise NotImplementedError(f"{name} {args}")

    @staticmethod
    def _permuted(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
        both, out = (a & _WORD) | b << U64(32), np.zeros_like(a)
        for i in range(4):
            byte = choice >> U64(4 * i) & U64(15)
            assert (byte < 8).all()
            out |= (both >> byte * U64(8) & U64(255)) << U64(8 * i)
        return out

    def _convert(self, parts: list[str], args: list[str], mask: np.ndarray) -> None:
        to, kind = parts[-2:]
        if to in ("bf16x2", "f16x2"):
            if kind == "e4m3x2":
                high, low = (from_e4m3(self._get(args[1]) >> U64(by) & U64(255)) for by in (8, 0))
            else:
                high, low = (floats(self._get(arg)) for arg in args[1:])
            with np.errstate(all="ignore"):
                closed = _PAIRS[to[:-2]][1]
                self._put(args[0], closed(low) | closed(high) << U64(16), mask)
        elif (to, kind) == ("e4m3x2", "f32"):
            # of a thread with one number alone Triton leaves the other one's register as it is
            one = U64(0) if args[1] not in self._registers else to_e4m3(floats(self._get(args[1])))
            high, low = one, to_e4m3(floats(self._get(args[2])))
            self._put(args[0], low | high << U64(8), mask)
        elif (to, kind) == ("bf16", "f32"):
            self._put(args[0], to_bf16(floats(self._get(args[1]))), mask)
        elif (to, kind) == ("f16", "f32"):
            self._put(args[0], to_f16(floats(self._get(args[1]))), mask)
        elif (to, kind) == ("f32", "s32"):
            self._put(args[0], bits_of(self._whole(args[1], kind).astype(np.float32)), mask)
        elif (to, kind) == ("f32", "f16"):
            self._put(args[0], bits_of(from_f16(self._get(args[1]))), mask)
        elif (to, kind) == ("u32", "u64"):
            self._put(args[0], self._get(args[1]), mask, to)
        elif (to, kind) == ("f32", "bf16"):
            self._put(args[0], bits_of(from_bf16(self._get(args[1]))), mask)
        elif (to, kind) == ("s32", "s8"):
            low = self._get(args[1]) & U64(255)
            self._put(args[0], low.astype(np.int64) - (low > 127) * 256, mask, to)
        else:
            assert kind in ("u16", "u32", "s32") and to in ("u16", "u32", "u64", "s64"), parts
            self._put(args[0], self._whole(args[1], kind), mask, to)

    def _move_halves(self, args: list[str], mask: np.ndarray) -> None:
        if args[0].startswith("{"):
            for by, name in enumerate(_names(args[0])):
                self._put(name, self._get(args[1]) >> U64(16 * by), mask, "b16")
            return
        low, high = (self._get(name) & _HALF for name in _names(args[1]))
        self._put(args[0], low | high << U64(16), mask)

    def _load(self, args: list[str], kind: str, mask: np.ndarray, memory: Memory) -> None:
        names, dtype = _names(args[0]), _SIZES[kind]
        data = memory.read(self._address(args[1]), np.dtype(dtype).itemsize * len(names), mask).view(dtype)
        for name, column in zip(names, data.T, strict=True):
            self._put(name, column.astype(np.int64), mask)

    def _add_to(self, args: list[str], kind: str, mask: np.ndarray) -> None:
        """Lane by lane."""
        assert kind == "u32"
        at, given = self._address(args[1]), self._get(args[2]).astype(np.uint32)
        for lane in np.nonzero(mask)[0]:
            own = np.arange(self._count) == lane
            before = self._memory.read(at, 4, own).view(np.uint32)[:, 0]
            self._put(args[0], before.astype(U64), own)
            self._memory.write(at, (before + given)[:, None].view(np.uint8), own)

    def _store(self, args: list[str], kind: str, mask: np.ndarray, memory: Memory) -> None:
        data = np.stack([self._get(name).astype(_SIZES[kind]) for name in _names(args[1])], 1)
        memory.write(self._address(args[0]), data.view(np.uint8), mask)

    def _copy(self, args: list[str], mask: np.ndarray) -> None:
        """4 or 16 bytes to shared memory, or zeros."""
        size = int(args[2], 0)
        count = self._get(args[3]) if len(args) > 3 else np.full(self._count, size, U64)
        assert size in (4, 16) and np.isin(count, (0, size)).all()
        data = self._memory.read(self._address(args[1]), size, mask & (count > 0))
        for lane, at in enumerate(self._address(args[0]).tolist()):
            if mask[lane]:
                self._shared[at : at + size] = data[lane]

    def _load_matrices(self, args: list[str], transposed: bool) -> None:
        """Up to four matrices of eight rows of 16 bytes; eight threads in turn know where the rows of one are."""
        at, lane = self._address(args[1]).astype(int), np.arange(self._count)
        for i, name in enumerate(_names(args[0])):
            if transposed:
                rows = (lane // 32 * 32 + 8 * i + lane % 4 * 2)[:, None] + np.arange(2)  # of both halves of a word
                start = at[rows][:, :, None] + (lane % 32 // 4 * 2)[:, None, None] + np.arange(2)
                words = self._shared[start].reshape(-1, 4).view(np.uint32)[:, 0]
                self._put(name, words.astype(U64), np.ones(self._count, bool))
                continue
            start = at[lane // 32 * 32 + 8 * i + lane % 32 // 4] + lane % 4 * 4
            words = self._shared[start[:, None] + np.arange(4)].view(np.uint32)[:, 0]
            self._put(name, words.astype(U64), np.ones(self._count, bool))

    def _store_matrices(self, args: list[str]) -> None:
        """The same, the other way round."""
        at, lane = self._address(args[0]).astype(int), np.arange(self._count)
        for i, name in enumerate(_names(args[1])):
            start = at[lane // 32 * 32 + 8 * i + lane % 32 // 4] + lane % 4 * 4
            self._shared[start[:, None] + np.arange(4)] = self._get(name).astype(np.uint32)[:, None].view(np.uint8)

    def _multiply(self, name: str, args: list[str]) -> None:
        """16 x 16 times 16 x 8 in every warp, all of it in registers."""
        if "k32" in name:
            return self._multiply_bytes(name, args)
        found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32", name)
        assert found, name
        opened = _PAIRS[found[1]][0]
        lane = np.arange(self._count) % 32
        row, thread, sums = lane // 4, lane % 4, [floats(self._get(one)) for one in _names(args[3])]
        words = [self._get(one) for one in (*_names(args[1]), *_names(args[2]))]
        for warp in range(self._count // 32):
            own = slice(warp * 32, warp * 32 + 32)
            r, t = row[own], thread[own]
            left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
            for i in range(6):
                for half in range(2):
                    value = opened(words[i][own] >> U64(16 * half))
                    if i < 4:
                        left[r + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = value
                    else:
                        right[2 * t + half + 8 * (i - 4), r] = value
            with np.errstate(all="ignore"):
                out = left @ right
            for i in range(4):
                sums[i][own] += out[r + 8 * (i // 2), 2 * t + i % 2]
        for one, value in zip(_names(args[0]), sums, strict=True):
            self._put(one, bits_of(value), np.ones(self._count, bool))

    def _multiply_bytes(self, name: str, args: list[str]) -> None:
        """16 x 32 times 32 x 8 of whole numbers."""
        found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.([su]8)\.s8\.s32", name)
        assert found, name
        lane = np.arange(self._count) % 32
        row, thread, sums = lane // 4, lane % 4, [self._whole(one, "s32") for one in _names(args[3])]
        words = [self._get(one) for one in (*_names(args[1]), *_names(args[2]))]
        for warp in range(self._count // 32):
            own = slice(warp * 32, warp * 32 + 32)
            r, t = row[own], thread[own]
            left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
            for i in range(6):
                for byte in range(4):
                    value = (words[i][own] >> U64(8 * byte) & U64(255)).astype(np.int64)
                    if i >= 4 or found[1] == "s8":
                        value -= (value > 127) * 256
                    if i < 4:
                        left[r + 8 * (i % 2), 4 * t + byte + 16 * (i // 2)] = value
                    else:
                        right[4 * t + byte + 16 * (i - 4), r] = value
            out = left @ right
            for i in range(4):
                sums[i][own] += out[r + 8 * (i // 2), 2 * t + i % 2]
        for one, value in zip(_names(args[0]), sums, strict=True):
            self._put(one, value, np.ones(self._count, bool), "b32")

    def _matmul(self, name: str, args: list[str]) -> None:
        """64 rows a warpgroup, from registers, times columns in shared memory."""
        found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", name)
        assert found and args[1].startswith("{") and args[4:] == ["1", "1", "0"], (name, args)
        lane = np.arange(self._count) % 128
        warp, row, thread = lane // 32, lane % 32 // 4, lane % 4
        adds = self._get(args[3]) != 0
        words = [self._get(name) for name in _names(args[1])]
        sums = {name: self._registers.get(name, np.zeros(self._count, U64)).copy() for name in _names(args[0])}
        for group in range(self._count // 128):
            own = slice(group * 128, group * 128 + 128)
            (descriptor,) = set(self._get(args[2])[own].tolist())
            right = self._described(descriptor, int(found[1]))
            left = np.zeros((64, 16), np.float32)
            for i, word in enumerate(words):
                r, c = (16 * warp + row + 8 * (i % 2))[own], (2 * thread + 8 * (i // 2))[own]
                left[r, c], left[r, c + 1] = from_bf16(word[own]), from_bf16(word[own] >> U64(16))
            with np.errstate(all="ignore"):
                out = left @ right.T
            for i, bits in enumerate(sums.values()):
                r, c = (16 * warp + row + 8 * (i % 4 // 2))[own], (8 * (i // 4) + 2 * thread + i % 2)[own]
                bits[own] = bits_of(np.where(adds[own], floats(bits[own]), 0.0) + out[r, c])
        self._registers |= sums

    def _described(self, descriptor: int, columns: int) -> np.ndarray:
        """[columns, 16]: rows of 128 bytes, in eights, whose pieces of 16 bytes are swizzled."""
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0
        n, k = np.arange(columns)[:, None], np.arange(16)[None, :]
        at = start + n // 8 * stride + n % 8 * 128 + k * 2
        at ^= (at >> 7 & 7) << 4
        return from_bf16(self._shared[at].astype(U64) | self._shared[at + 1].astype(U64) << U64(8))


def _names(text: str) -> list[str]:
    """Of registers, in braces if they are several."""
    return [name.strip() for name in text.strip("{} ").split(",")]
