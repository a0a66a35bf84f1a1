"""Which tensors a checkpoint lacks or has too many of, listed layer by layer.

In: names. Out: text for one error. Must not know: where names come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.schema.errors import CheckpointError, some

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.(.+)")
MOST_LAYERS = 4


def check_complete(path: str, missing: list[str], unexpected: list[str]) -> None:
    """CheckpointError if a checkpoint has too few or too many tensors for its architecture."""
    problems = []
    if missing:
        problems.append(f"{_tensors(missing, 'is', 'are')} missing ({by_layer(missing)})")
    if unexpected:
        problems.append(f"{_tensors(unexpected, 'has', 'have')} no place in it ({by_layer(unexpected)})")
    if problems:
        raise CheckpointError(f"{path} does not fit its architecture: " + "; ".join(problems))


def _tensors(names: list[str], one: str, several: str) -> str:
    return f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"


def by_layer(names: Iterable[str]) -> str:
    """'lm_head.weight; layer 0: self_attn.q_proj.weight, mlp.up_proj.weight; 3 more layers'. Few names stay whole."""
    names = list(names)
    if len(names) <= 2:
        return ", ".join(names)
    outside: list[str] = []
    layers: dict[int, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match is None:
            outside.append(name)
        else:
            layers.setdefault(int(match[1]), []).append(match[2])
    parts = [some(outside)] if outside else []
    numbers = sorted(layers)
    alike: dict[tuple[str, ...], list[int]] = {}
    for number in numbers:
        alike.setdefault(tuple(layers[number]), []).append(number)
    for inner, where in list(alike.items())[:MOST_LAYERS]:
        parts.append(f"{_spans(where)}: {some(inner)}")
    if len(alike) > MOST_LAYERS:
        parts.append(f"other sets of names in {sum(map(len, list(alike.values())[MOST_LAYERS:]))} more layers")
    return "; ".join(parts)


def _spans(numbers: list[int]) -> str:
    """'layer 3', 'layers 0-3, 7'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"
