"""Scores of pairs of texts: which prompts they become, and what comes of their results.

Three ways, by the model (`score_type`): a cross-encoder reads both texts in one prompt and its only class is the score;
a bi-encoder embeds each text, and the score is the cosine; late interaction embeds every token, and the score is the
sum over the first text's tokens of the best dot product with a token of the second. Used by LLM and the server alike.
Must not know: engines, HTTP.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import TYPE_CHECKING

from quire.schema.errors import InputError, NotBuiltError
from quire.schema.prompt import Prompt
from quire.schema.step import Pooled

if TYPE_CHECKING:
    from quire.engine.pooling import PoolingInputs

Pair = tuple[str, str]
_TILE = 1 << 20  # dot products of one tile of max_sim


def texts_of(data: object, name: str) -> list[str]:
    """One text, or several."""
    items = [data] if isinstance(data, str | Mapping) else data
    if not isinstance(items, Sequence) or not items:
        raise InputError(f"{name} must be a text, or a non-empty list of texts", param=name)
    for item in items:
        if isinstance(item, Mapping):
            raise NotBuiltError(f"{name}: only text can be scored in this version of Quire", param=name)
        if not isinstance(item, str):
            raise InputError(f"{name} holds {item!r:.100}; every entry must be a text", param=name)
    return list(items)


def pair_up(first: Sequence[str], second: Sequence[str], names: Pair = ("data_1", "data_2")) -> list[Pair]:
    """1 to 1, 1 to N (the first is repeated), or N to N."""
    if len(first) not in (1, len(second)):
        raise InputError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: the first must have one, or as many",
            param=names[0],
        )
    return list(zip(first if len(first) > 1 else list(first) * len(second), second, strict=True))


def check_scoring(pooling: PoolingInputs) -> None:
    if not pooling.score_type:
        raise InputError(
            "this model cannot score pairs of texts: it needs embeddings, or a classifier with one class "
            f"(num_labels=1); it can {', '.join(pooling.tasks)}",
            param="model",
        )


def pair_messages(pair: Pair) -> list[dict[str, str]]:
    """What a template is given of a pair."""
    return [{"role": "query", "content": pair[0]}, {"role": "document", "content": pair[1]}]


def cross_prompts(
    pooling: PoolingInputs, pairs: Sequence[Pair], keep: int | None, template: str | None
) -> list[Prompt]:
    """Both texts of each pair as one prompt: through a template with the roles query and document, by the tokenizer's
    rule for pairs, or (for a model that was a generator) one right after the other. No pair is put together before all
    are known to be of a length that the model may take."""
    for first, second in pairs:
        pooling.check_pair(first, second, is_cut=keep is not None)
    return [_cross_prompt(pooling, pair, keep, template) for pair in pairs]


def _cross_prompt(pooling: PoolingInputs, pair: Pair, keep: int | None, template: str | None) -> Prompt:
    if template is not None:
        text = pooling.tokenizer.apply_chat_template(pair_messages(pair), chat_template=template, tokenize=False)
        return Prompt(text=str(text))
    first, second = pair
    if not pooling.takes_pairs:
        return Prompt(text=first + second)
    return pooling.pair(first, second, keep)


def floats(pooled: Pooled) -> list[float]:
    """All values, row after row."""
    return array("f", pooled.data).tolist()


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    sizes = math.sqrt(sum(map(mul, first, first))) * math.sqrt(sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / sizes if sizes else 0.0


def max_sim(first: Pooled, second: Pooled) -> float:
    """Late interaction, in tiles: the dot products of some rows of the first with all of the second at once."""
    import numpy as np  # lazy

    one, other = (np.frombuffer(p.data, np.float32).reshape(p.shape) for p in (first, second))
    if not one.size or not other.size:
        return 0.0
    rows = max(1, _TILE // len(other))
    return sum(float((one[at : at + rows] @ other.T).max(1).sum()) for at in range(0, len(one), rows))


def join_parts(parts: Sequence[tuple[Pooled, int]], *, dimensions: int | None, normalize: bool) -> Pooled:
    """One embedding of a long input from those of its parts: their mean, weighted by (part, number of tokens)."""
    total = sum(count for _, count in parts)
    columns = zip(*([value * count for value in floats(pooled)] for pooled, count in parts), strict=True)
    values = [math.fsum(column) / total for column in columns][:dimensions]
    if normalize:
        size = math.sqrt(math.fsum(map(mul, values, values)))
        values = [value / size for value in values] if size else values
    from array import array  # lazy

    return Pooled((len(values),), "float32", array("f", values).tobytes())
