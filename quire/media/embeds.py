"""Media given as embeddings: what the encoder would have made, (vectors, width), checked and placed as it is.

Behind enable_mm_embeds. In: what stands in `multi_modal_data`, or in a part of a chat. Out: items, whose counts, widths
and grids agree before any of their numbers is read. Must not know: how bytes of a request become an array, what a
family's grid means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.media.arrays import as_array, as_stored, cut, shape_of
from quire.media.families.base import Beside, Family, Numbers, ProcessedItem
from quire.schema.errors import InputError
from quire.schema.media import ArrayData

ARRAY = "embeds"
MOST_NUMBERS = 1 << 14  # beside the embeddings of a prompt
_MOST_VECTORS = 1 << 20
_MOST_DEPTH = 4  # of lists
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class EmbedsPart:
    """Of a chat: arrays, or lists of numbers, by their names."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class GivenEmbeds:
    """One item, whose vectors are not read yet."""

    vectors: Any  # (vectors, width)
    num: int
    numbers: Numbers  # beside them, by name


def is_embeds(value: Any, width: int | None) -> bool:
    """Of one item or of several: named so, or floats whose last dimension is the width of a vector."""
    if isinstance(value, EmbedsPart):
        return True
    if isinstance(value, Mapping):
        return any(str(key).endswith("_embeds") for key in value)
    shape = shape_of(value)
    return len(shape) in (2, 3) and shape[-1] == width and hasattr(value, "dtype") and "float" in str(value.dtype)


def given_embeds(
    value: Any, modality: str, family: Family, width: int | None, options: Mapping[str, Any], most: int | None = None
) -> list[GivenEmbeds]:
    """The items that they are of. `options`: of the processor. `most`: vectors of an item."""
    name = f"{modality}_embeds"
    fields = value.fields if isinstance(value, EmbedsPart) else value if isinstance(value, Mapping) else {name: value}
    known = family.beside_embeds.get(modality, {})
    _check_names(fields, name, known, modality)
    numbers = _by_item({one: _rows(fields[one], one, kind) for one, kind in known.items() if one in fields})
    limit = _MOST_VECTORS if most is None else min(most, _MOST_VECTORS)
    counts = _counts(numbers, modality, family, options, limit)
    vectors = _split(fields[name], name, counts)
    if not known:
        numbers = [{} for _ in vectors]
    elif len(vectors) != len(numbers):
        raise _wrong(f"{name} has {len(vectors)} items, and {next(iter(known))} is of {len(numbers)}")
    nums = [_num_vectors(one, name, width, limit) for one in vectors]
    for num, count, beside in zip(nums, counts, numbers, strict=False):
        if num != count:
            raise _wrong(f"{name} has {num} vectors, and an item with {_said(beside)} has {count}")
    return [GivenEmbeds(*one) for one in zip(vectors, nums, numbers, strict=True)]


def _by_item(rows: Mapping[str, Sequence[Sequence[float]]]) -> list[Numbers]:
    lengths = {name: len(several) for name, several in rows.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name} is of {num} items" for name, num in lengths.items())
        raise _wrong(f"what comes with embeddings differs in number: {each}")
    return [
        {name: several[index] for name, several in rows.items()} for index in range(max(lengths.values(), default=0))
    ]


def _counts(
    items: Sequence[Numbers], modality: str, family: Family, options: Mapping[str, Any], limit: int
) -> list[int]:
    """Vectors of each item, which take as long to count as they are many: not of items behind those that do not fit."""
    counts: list[int] = []
    total = 0
    for one in items:
        if total > limit:
            raise _wrong(
                f"{modality} embeddings with {len(items)} items: the first {len(counts)} have {total} vectors; the "
                f"prompt and its answer may have {limit} (max_model_len)"
            )
        counts.append(family.count_embeds(modality, one, options))
        total += counts[-1]
    return counts


def embeds_item(item: GivenEmbeds, modality: str, family: Family, options: Mapping[str, Any]) -> ProcessedItem:
    data = item.vectors if isinstance(item.vectors, ArrayData) else _array_data(item.vectors)
    if len(data.shape) == 3:
        data = ArrayData(data.shape[1:], data.dtype, data.data)
    if data.dtype not in _SIZES:
        raise _wrong(f"media embeddings must be float32, float16 or bfloat16, got {data.dtype}")
    if len(data.data) != math.prod(data.shape) * _SIZES[data.dtype]:
        raise _wrong(f"media embeddings of shape {list(data.shape)} and {data.dtype} have {len(data.data)} bytes")
    if not are_finite(data.data, data.dtype):
        raise _wrong("media embeddings must be finite numbers")
    if item.numbers:
        text, arrays = family.lay_out_embeds(modality, item.numbers, options)
    else:
        text, arrays = family.embeds_text(modality, item.num), {}
    return ProcessedItem({ARRAY: data, **arrays}, text, item.num)


def are_finite(data: bytes, dtype: str) -> bool:
    """Of float32, float16 or bfloat16, as stored: no NaN and no infinity."""
    import numpy as np  # lazy

    if dtype == "bfloat16":
        return bool(((np.frombuffer(data, "<u2") & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))).all())


def _wrong(why: str) -> InputError:
    return InputError(why, param="multi_modal_data")


def _said(numbers: Numbers) -> str:
    return ", ".join(f"{name} {list(several)[:4]}" for name, several in numbers.items())


def _check_names(fields: Mapping[str, Any], name: str, known: Mapping[str, Beside], modality: str) -> None:
    taken = ", ".join((name, *known))
    for one in fields:
        if one != name and one not in known:
            raise _wrong(f"{modality} embeddings with {one!r:.60}: this model takes {taken}")
    needed = [name, *(one for one, kind in known.items() if one in fields or not kind.is_optional)]
    if missing := [one for one in needed if fields.get(one) is None]:
        raise _wrong(f"{modality} embeddings of this model come with {missing[0]} ({taken})")


# ---- vectors --------------------------------------------------------------------------------------------------------


def _split(value: Any, name: str, counts: Sequence[int]) -> list[Any]:
    """By item: a list of arrays, one array with a dimension for items, or the vectors of all items one after another,
    of which `counts` says where each ends."""
    if isinstance(value, (list, tuple)):
        if any(shape_of(one) for one in value):
            return list(value)
        value = _read(value, name)
    shape = shape_of(value)
    if len(shape) == 3 and shape[0] != 1:
        if shape[0] > MOST_NUMBERS:
            raise _wrong(f"{name} has {shape[0]} items; the limit is {MOST_NUMBERS}")
        return [cut(value, index, index + 1) for index in range(shape[0])]
    if len(shape) != 2 or len(counts) < 2:
        return [value]
    if sum(counts) != shape[0]:
        raise _wrong(f"{name} has {shape[0]} vectors, and its {len(counts)} items have {sum(counts)}")
    ends = itertools.accumulate(counts)
    return [cut(value, end - count, end) for count, end in zip(counts, ends, strict=True)]


def _num_vectors(value: Any, name: str, width: int | None, limit: int) -> int:
    shape = shape_of(value)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[1] != width or not shape[0]:
        raise _wrong(f"{name} has the shape {list(shape)[:6]}; expected (vectors, {width})")
    if shape[0] > limit:
        raise _wrong(f"{name} has {shape[0]} vectors; the prompt and its answer may have {limit} (max_model_len)")
    return int(shape[0])


def _array_data(value: Any) -> ArrayData:
    import numpy as np  # lazy

    array, dtype = as_stored(value)
    if dtype == "float64":
        with np.errstate(over="ignore"):  # infinity is refused later
            array, dtype = array.astype(np.float32), "float32"
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return ArrayData(tuple(map(int, array.shape)), dtype, little.tobytes())


def _read(value: Any, name: str) -> Any:
    try:
        return as_array(value)
    except (ValueError, TypeError, OverflowError) as wrong:
        if isinstance(wrong, InputError):
            raise
        raise _wrong(f"{name} cannot be read as an array: {str(wrong)[:200]}") from None


# ---- numbers beside them --------------------------------------------------------------------------------------------


def _rows(value: Any, name: str, kind: Beside) -> list[list[float]]:
    """Those of each item: rows of an array or a list; a single row is of one item."""
    if kind.is_list:
        return _groups(value, name, kind)
    if isinstance(value, (list, tuple)) and not all(map(_is_number, value)):
        several = [_flat(one, name) for one in _short(value, name)]
    else:
        shape = shape_of(value)
        flat = _flat(value, name)
        length = shape[1] if len(shape) == 2 else 1 if kind.num == 1 else len(flat)
        several = [flat[at : at + length] for at in range(0, len(flat), max(length, 1))]
    _short([one for row in several for one in row], name)
    for row in several:
        kind.check(name, row)
    if not several:
        raise _wrong(f"{name} is empty")
    return several


def _groups(value: Any, name: str, kind: Beside) -> list[list[float]]:
    """Of an item any number of rows; or, one dimension more, of several items."""
    if isinstance(value, ArrayData) or shape_of(value):
        shape = shape_of(value)
        value = _checked(value, shape, name, 3).reshape(shape).tolist()
    is_one = _depth(value) <= (1 if kind.num == 1 else 2)
    several = [_flattened(one, name) for one in ([value] if is_one else _short(value, name))]
    _short([one for row in several for one in row], name)
    for row in several:
        kind.check(name, row)
    if not all(several):
        raise _wrong(f"{name} is empty")
    return several


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, (list, tuple)) and depth < _MOST_DEPTH:
        value, depth = value[0] if value else 0, depth + 1
    return depth + len(shape_of(value))


def _flattened(value: Any, name: str) -> list[float]:
    """Rows of numbers, or numbers."""
    if isinstance(value, (list, tuple)) and not all(map(_is_number, value)):
        return [one for row in _short(value, name) for one in _flat(row, name)]
    return _flat(value, name)


def _flat(value: Any, name: str) -> list[float]:
    if _is_number(value):
        return [value]
    if isinstance(value, (list, tuple)):
        for one in _short(value, name):
            if not _is_number(one):
                raise _wrong(f"{name} must be numbers, got a {type(one).__name__}")
        return list(value)
    flat: list[float] = _checked(value, shape_of(value), name, 2).reshape(-1).tolist()
    return flat


def _checked(value: Any, shape: Sequence[int], name: str, most_dims: int) -> Any:
    if len(shape) > most_dims or math.prod(shape) > MOST_NUMBERS:
        raise _wrong(f"{name} has the shape {list(shape)[:6]}; expected rows of numbers, {MOST_NUMBERS} at most")
    array = _of_data(value) if isinstance(value, ArrayData) else _read(value, name)
    if array.dtype.kind not in "iuf":
        raise _wrong(f"{name} must be numbers, got a {type(value).__name__} ({array.dtype})")
    return array


def _of_data(data: ArrayData) -> Any:
    import numpy as np  # lazy

    return np.frombuffer(data.data, np.dtype(data.dtype).newbyteorder("<"))


def _short(value: Sequence[Any], name: str) -> Sequence[Any]:
    if len(value) > MOST_NUMBERS:
        raise _wrong(f"{name} has {len(value)} entries; the limit is {MOST_NUMBERS}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
