"""Repetition: whether an output ends in copies of one pattern, asked after every token.

A pattern of `size` tokens is there `copies` times when the last `size * (copies - 1)` tokens each equal the one `size`
before. A size that lacks some of these cannot be there before so many more tokens have come, and is not looked at until
then: about the logarithm of the output's length in looks for each token, whatever sizes are allowed.
Must not know: why a request ends, or what else may end it.
"""

from __future__ import annotations

from quire.schema.params import RepetitionDetectionParams


class Repetition:
    def __init__(self, rule: RepetitionDetectionParams, *, start: int) -> None:
        """`start`: where the output begins among the tokens."""
        self._copies = max(2, rule.min_count)
        self._next_size = max(1, rule.min_pattern_size)  # the smallest the output was too short for
        self._largest = rule.max_pattern_size
        self._start = start
        self._seen = 0  # the output's length at the last question
        self._due: dict[int, list[int]] = {}  # length of the output -> sizes to look at then

    def found(self, tokens: list[int]) -> bool:
        """`tokens` may have grown since the last question, and by any number."""
        length, answer = len(tokens) - self._start, False
        for size in self._sizes_due(length):
            needed = size * (self._copies - 1)
            equal = _count_equal(tokens, size, needed)
            answer = answer or equal == needed
            self._due.setdefault(length + max(1, needed - equal), []).append(size)
        return answer

    def _sizes_due(self, length: int) -> list[int]:
        sizes: list[int] = []
        for past in range(self._seen + 1, length + 1):
            sizes += self._due.pop(past, ())
        self._seen = max(self._seen, length)
        while self._next_size <= self._largest and self._next_size * self._copies <= length:
            sizes.append(self._next_size)
            self._next_size += 1
        return sizes


def _count_equal(tokens: list[int], size: int, most: int) -> int:
    """How many tokens at the end, up to `most`, equal the one `size` before."""
    end = len(tokens)
    for count in range(most):
        if tokens[end - 1 - count] != tokens[end - 1 - count - size]:
            return count
    return most
