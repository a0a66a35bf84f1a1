"""Tests of several factors: `make test` takes every value of each factor, `make long` (`pytest --long -m long`) the
other combinations. What `make test` leaves out bears the mark `long`; each of its values is tried without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

# One architecture of each kind of layer, of arithmetic and of memory; the others are made of the same parts.
KINDS = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
    "Gemma2ForCausalLM", "Llama4ForCausalLM", "BambaForCausalLM", "MambaForCausalLM", "Qwen3NextForCausalLM",
    "KimiLinearForCausalLM", "MiniMaxForCausalLM", "Lfm2ForCausalLM", "PhimoeForCausalLM", "ApertusForCausalLM",
    "Gemma3nForCausalLM",
)  # fmt: skip


def marked(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test, tuples where it has several: those that are not kept for `make test` are long."""
    return [value if value in kept else _long(*value) if isinstance(value, tuple) else _long(value) for value in values]


def spread(*factors: Sequence[Any]) -> list[Any]:
    """All combinations as parameters. Those that are not long are as many as the factor with most values has: of each
    factor they have all values, in turn, shifted by one more with each further factor."""
    kept = {
        tuple((number + at * (number // len(factor))) % len(factor) for at, factor in enumerate(factors))
        for number in range(max(map(len, factors)))
    }
    return [values if place in kept else _long(*values) for place, values in _combinations(factors)]


def _combinations(factors: Sequence[Sequence[Any]]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    if not factors:
        yield (), ()
        return
    for number, value in enumerate(factors[0]):
        for place, values in _combinations(factors[1:]):
            yield (number, *place), (value, *values)


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
