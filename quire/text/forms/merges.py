"""Merges for vocabularies that only rank their tokens (sentencepiece BPE, tiktoken).

Those join whichever neighbours give the best-ranked token; a list of every way to make each token from two others, in
order of rank, says the same to a BPE that works from a list of merges. Two ways to make one token compete only where
they overlap ("a|aa|a"): there the longer left part goes first for sentencepiece, as in published conversions.
"""

from __future__ import annotations

from collections.abc import Sequence


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """`tokens` best first."""
    known = frozenset(tokens)
    merges: list[tuple[str, str]] = []
    append = merges.append
    for token in tokens:  # the hot loop of loading a large vocabulary: over a million cuts
        for cut in range(len(token) - 1, 0, -1):
            right = token[cut:]
            if right in known:
                left = token[:cut]
                if left in known:
                    append((left, right))
    return merges
