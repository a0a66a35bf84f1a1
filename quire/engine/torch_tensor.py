"""One dense tensor from the bytes of a file that torch.save wrote, without running anything in it.

Owns: the part of the format that such a file has. It is a zip archive of stored (not compressed) entries: data.pkl
describes the tensor, data/<key> holds its numbers. The description is a pickle; its opcodes are listed, never executed,
and anything but the few that describe one tensor is refused. Nothing larger than the input is ever allocated. Must not
know: torch, what the tensor is for.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.schema.errors import InputError

_STORAGES = {
    "FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2), "BFloat16Storage": ("bfloat16", 2),
    "DoubleStorage": ("float64", 8), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16")
NUMBERS = ("int64", "int32", "float32", "float64")
_OF_ARCHIVES = (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, RuntimeError)
_MOST_ENTRIES = 32
_MOST_PICKLE = 1 << 14  # bytes of a description
_MARK = object()
_REBUILD, _STORAGE, _HOOKS = "torch._utils _rebuild_tensor_v2", "torch", "collections OrderedDict"
_PUSHED = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class DenseTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    data: bytes  # row-major, little-endian


class _NoTensorError(Exception):
    """Why."""


class _Name(NamedTuple):
    text: str


class _StoredNumbers(NamedTuple):
    dtype: str
    item_size: int
    key: str
    num_items: int


class _Strided(NamedTuple):
    storage: _StoredNumbers
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensor(
    content: bytes, *, most_dims: int, most_items: int, dtypes: Sequence[str] = FLOATS, name: str, param: str
) -> DenseTensor:
    """An InputError says what is wrong with it. `most_dims`, `most_items`: of the tensor, which is called `name` and
    came as the field `param`."""
    try:
        return _read(content, most_dims, most_items, dtypes)
    except (_NoTensorError, *_OF_ARCHIVES) as wrong:
        why = str(wrong) or type(wrong).__name__
        raise InputError(f"{name} is not a tensor as torch.save writes it: {why}", param=param) from None


def _read(content: bytes, most_dims: int, most_items: int, dtypes: Sequence[str]) -> DenseTensor:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if len(entries) > _MOST_ENTRIES:
            raise _NoTensorError(f"the file has {len(entries)} entries")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise _NoTensorError("entries of the file are compressed or encrypted")
        files = {entry.filename.partition("/")[2]: entry for entry in entries}
        if "data.pkl" not in files or files["data.pkl"].file_size > _MOST_PICKLE:
            raise _NoTensorError("the file has no data.pkl, or a large one")
        if "byteorder" in files and archive.read(files["byteorder"]) != b"little":
            raise _NoTensorError("its numbers are not little-endian")
        tensor = _described(archive.read(files["data.pkl"]), dtypes)
        _check(tensor, most_dims, most_items)
        stored = files.get(f"data/{tensor.storage.key}")
        expected = tensor.storage.num_items * tensor.storage.item_size
        if stored is None or stored.file_size != expected:
            raise _NoTensorError(f"its numbers are not the {expected} bytes that the description names")
        numbers = archive.read(stored)
        if len(numbers) != expected:  # sizes that an archive names are its sender's words
            raise _NoTensorError(f"it has {len(numbers)} bytes of numbers instead of {expected}")
        return DenseTensor(tensor.shape, tensor.storage.dtype, _gathered(tensor, numbers))


def _check(tensor: _Strided, most_dims: int, most_items: int) -> None:
    shape, strides = tensor.shape, tensor.strides
    if len(shape) > most_dims or len(strides) != len(shape) or min((*shape, 0)) < 0 or math.prod(shape) > most_items:
        raise _NoTensorError(
            f"it has shape {list(shape)[:8]}; at most {most_dims} dimensions and {most_items} numbers are taken here"
        )
    if math.prod(shape) > tensor.storage.num_items:
        raise _NoTensorError("its numbers are used more than once (save tensor.contiguous())")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    outside = min((*strides, tensor.offset, 0)) < 0 or last >= tensor.storage.num_items
    if math.prod(shape) and outside:
        raise _NoTensorError("it reaches outside its numbers")


def _gathered(tensor: _Strided, stored: bytes) -> bytes:
    """The numbers of the tensor, in the order of its positions."""
    import numpy as np  # lazy

    size = tensor.storage.item_size
    flat = np.frombuffer(stored, f"<u{size}")[tensor.offset :]
    if not math.prod(tensor.shape):
        return b""
    # A stride that is never taken may be any number, also one that numpy cannot hold.
    strides = tuple(stride * size if num > 1 else 0 for stride, num in zip(tensor.strides, tensor.shape, strict=True))
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).tobytes()


def _described(pickled: bytes, dtypes: Sequence[str]) -> _Strided:
    """What the opcodes of a pickle would make, if it is one tensor."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, value, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                break
            _follow(opcode.name, value, stack, memo, dtypes)
    except _NoTensorError:
        raise
    except Exception as wrong:  # noqa: BLE001  # the lister raises several kinds for a pickle that is none
        raise _NoTensorError(f"its description cannot be read ({type(wrong).__name__})") from None
    if len(stack) != 1 or not isinstance(stack[0], _Strided):
        raise _NoTensorError(f"it does not hold one dense tensor of {_any_of(dtypes)} (use tensor.detach())")
    return stack[0]


def _any_of(dtypes: Sequence[str]) -> str:
    return f"{', '.join(dtypes[:-1])} or {dtypes[-1]}"


def _follow(name: str, value: Any, stack: list[Any], memo: dict[int, Any], dtypes: Sequence[str]) -> None:
    if name in ("BINPUT", "LONG_BINPUT"):
        memo[value] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[value])
    elif name in ("PROTO", "FRAME"):
        return
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _PUSHED:
        stack.append(value)
    elif name in ("NEWFALSE", "NEWTRUE"):
        stack.append(name == "NEWTRUE")
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        stack[at:] = [tuple(stack[at + 1 :])]
    elif name == "GLOBAL":
        stack.append(_Name(str(value)))
    elif name == "STACK_GLOBAL":
        stack[-2:] = [_Name(f"{stack[-2]} {stack[-1]}")]
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop(), dtypes))
    elif name == "REDUCE":
        args = stack.pop()
        stack.append(_made(stack.pop(), args))
    else:
        raise _NoTensorError(f"its description has {name}, which no dense tensor needs")


def _storage(described: Any, dtypes: Sequence[str]) -> _StoredNumbers:
    kind, storage, key, _, count = described
    package, _, name = storage.text.partition(" ")
    dtype, size = _STORAGES.get(name, ("", 0))
    if kind != "storage" or package != _STORAGE or dtype not in dtypes or not isinstance(count, int) or count < 0:
        raise _NoTensorError(f"it holds a {storage.text}; numbers must be {_any_of(dtypes)}")
    return _StoredNumbers(dtype, size, str(key), count)


def _made(function: Any, args: Any) -> Any:
    if function == _Name(_HOOKS) and args == ():
        return None
    if function != _Name(_REBUILD):
        raise _NoTensorError(f"it holds a {function.text if isinstance(function, _Name) else function!r}, not a tensor")
    storage, offset, shape, strides = args[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _StoredNumbers) or any(type(one) is not int for one in numbers):
        raise _NoTensorError("its description does not name a storage, a shape and strides")
    return _Strided(storage, offset, tuple(shape), tuple(strides))
