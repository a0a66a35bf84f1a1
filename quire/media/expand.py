"""Where items stand: one placeholder in a prompt becomes the tokens that an item takes, and its range is found.

Texts are expanded before they are tokenized, because neighbours of a placeholder may merge with what surrounds its
item; prompts of token ids are expanded id by id. Must not know: pixels, hashes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.media.families.base import Family, ProcessedItem
from quire.schema.errors import InputError


class TextEncoder(Protocol):
    """What is used of a tokenizer."""

    special: dict[str, str]  # "bos_token" -> "<s>" and so on

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...


class Place(NamedTuple):
    modality: str
    number: int  # among the items of its modality
    offset: int
    length: int
    takes_vector: bytes  # empty: all do


Items = Mapping[str, Sequence[ProcessedItem]]


def expand_text(family: Family, text: str, items: Items) -> str:
    if not items:
        return text
    text = family.lay_out(text)
    names = {family.placeholders[modality]: modality for modality in items}
    for token, modality in names.items():
        if text.count(token) != len(items[modality]):
            raise _wrong_count(token, text.count(token), len(items[modality]), modality)
    used = dict.fromkeys(items, 0)

    def replacement(match: re.Match[str]) -> str:
        modality = names[match[0]]
        used[modality] += 1
        return items[modality][used[modality] - 1].text

    return re.sub("|".join(map(re.escape, names)), replacement, text)


def begun(text: str, tokenizer: TextEncoder) -> str:
    """With the token that begins a text, or else the one that ends it, unless it begins so."""
    first = tokenizer.special.get("bos_token") or tokenizer.special.get("eos_token") or ""
    return text if text.startswith(first) else first + text


def expand_ids(family: Family, ids: Sequence[int], items: Items, tokenizer: TextEncoder) -> list[int]:
    """Ids that are expanded already, as transformers' processors write them, stay as they are."""
    expected, numbers = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()  # by tokens, which modalities may share
    for modality, several in items.items():
        tokens = _vector_tokens(family, modality, tokenizer)
        expected[tokens] += sum(item.num_vectors for item in several)
        numbers[tokens] += len(several)
    if expected != numbers and all(sum(one in tokens for one in ids) == num for tokens, num in expected.items()):
        return list(ids)
    names = {token_id(tokenizer, family.placeholders[modality]): modality for modality in items}
    for token, modality in names.items():
        if (count := list(ids).count(token)) != len(items[modality]):
            raise _wrong_count(family.placeholders[modality], count, len(items[modality]), modality)
    used, out = dict.fromkeys(items, 0), list[int]()
    for one in ids:
        modality_here = names.get(one)
        if modality_here is None:
            out.append(one)
            continue
        item = items[modality_here][used[modality_here]]
        used[modality_here] += 1
        out += tokenizer.encode(item.text, add_special_tokens=False)
    return out


def order_of(family: Family, prompt: str | Sequence[int], items: Items, tokenizer: TextEncoder) -> list[str]:
    """Modalities of the items of a prompt that is not expanded yet, in their order; of one that
    is expanded: one modality after the other."""
    if not items:
        return []
    if isinstance(prompt, str):
        names = {family.placeholders[modality]: modality for modality in items}
        order = [names[match[0]] for match in re.finditer("|".join(map(re.escape, names)), prompt)]
    else:
        ids = {token_id(tokenizer, family.placeholders[modality]): modality for modality in items}
        order = [ids[one] for one in prompt if one in ids]
    counts = {modality: len(several) for modality, several in items.items()}
    if any(order.count(modality) != count for modality, count in counts.items()):
        return [modality for modality, count in counts.items() for _ in range(count)]
    return order


def find_places(
    family: Family, ids: Sequence[int], items: Items, tokenizer: TextEncoder, order: Sequence[str] = ()
) -> list[Place]:
    """The range of an item goes from its first position with a vector to its last. In the order of the prompt, which
    `order` tells where modalities share a token."""
    places: list[Place] = []
    by_tokens: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
    tokens = {modality: _vector_tokens(family, modality, tokenizer) for modality in items}
    numbers = {modality: iter(enumerate(several)) for modality, several in items.items()}
    for modality in order or [modality for modality, several in items.items() for _ in several]:
        index, item = next(numbers[modality])
        by_tokens.setdefault(tokens[modality], []).append((modality, index, item.num_vectors))
    for own_tokens, expected in by_tokens.items():
        positions = [place for place, one in enumerate(ids) if one in own_tokens]
        if len(positions) != sum(num for _, _, num in expected):
            raise InputError(
                f"the prompt has {len(positions)} positions for vectors of its {expected[0][0]} items, which have "
                f"{sum(num for _, _, num in expected)}: it must not contain these tokens besides",
                param="prompt",
            )
        start = 0
        for modality, index, num in expected:
            own = positions[start : start + num]
            start += num
            first, length = own[0], own[-1] - own[0] + 1
            mask = b"" if length == num else _mask(own, first, length)
            places.append(Place(modality, index, first, length, mask))
    places.sort(key=lambda place: place.offset)
    for one, following in itertools.pairwise(places):
        if one.offset + one.length > following.offset:
            raise InputError("items of different modalities overlap in the prompt", param="prompt")
    return places


def _mask(positions: Sequence[int], first: int, length: int) -> bytes:
    mask = bytearray(length)
    for position in positions:
        mask[position - first] = 1
    return bytes(mask)


def _vector_tokens(family: Family, modality: str, tokenizer: TextEncoder) -> tuple[int, ...]:
    """Whose positions get vectors."""
    names = (family.feature(modality), *family.marks.get(modality, ()))
    return tuple(token_id(tokenizer, name) for name in names)


def token_id(tokenizer: TextEncoder, token: str) -> int:
    known = tokenizer.token_to_id(token)
    if known is None:
        raise InputError(f"the model's tokenizer has no token {token!r}, which stands for media", param="tokenizer")
    return known


def _wrong_count(token: str, count: int, num: int, modality: str) -> InputError:
    return InputError(
        f"the prompt has {count} placeholders {token!r} for {num} {modality} items; there must be one for each item",
        param="prompt",
    )
