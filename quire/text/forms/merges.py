"""Merges for vocabularies that only rank their tokens (sentencepiece BPE, tiktoken).

Those join whichever neighbours give the best-ranked token; a list of every way to make each token from two others, in
order of rank, says the same to a BPE that works from a list of merges.
"""

from __future__ import annotations

from collections.abc import Sequence


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """`tokens` best first. Of two ways to make one token the one with the better-ranked parts comes first."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        if len(token) < 2:
            continue
        ways = [
            (rank[token[:cut]], rank[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in rank and token[cut:] in rank
        ]
        if len(ways) > 1:
            ways.sort()
        merges += [(token[:cut], token[cut:]) for _, _, cut in ways]
    return merges
