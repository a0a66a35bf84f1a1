"""TokenIndex: where a run of tokens occurred earlier in a growing text, in constant time per token.

Every position is linked to the latest earlier one that follows the same `width` tokens, so the occurrences of the
text's end are a chain, newest first. How long they agree before that is found by comparing, for a bounded number of
them. Must not know: rows, or what an occurrence is used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BITS = 32  # of a token id within a key


class TokenIndex:
    __slots__ = ("_key", "_latest", "_links", "_mask", "dropped", "text", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.text: list[int] = []  # what is left of it: `dropped` tokens stood before
        self.dropped = 0
        self._links: list[int] = [
            0
        ]  # of each position from `dropped` on: the one before it, after equal tokens; 0: none
        self._latest: dict[int, int] = {}  # key of `width` tokens -> position after their last occurrence
        self._key, self._mask = 0, (1 << BITS * width) - 1

    @property
    def length(self) -> int:
        return self.dropped + len(self.text)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Ids are not negative, but for -1, which separates texts."""
        text, links, latest, mask, key = self.text, self._links, self._latest, self._mask, self._key
        at = self.length
        for token in token_ids:
            at += 1
            key = (key << BITS | token + 1) & mask
            text.append(token)
            links.append(latest.get(key, 0))
            latest[key] = at
        self._key = key

    def occurrences(self, most: int) -> Iterator[int]:
        """Positions, newest first, before which the same `width` tokens stand as at the end of the text."""
        if self.length >= self.width:
            yield from self._chain(self._links[-1], most)

    def occurrences_of(self, tail: list[int], most: int) -> Iterator[int]:
        """The same for the end of another text."""
        if len(tail) >= self.width:
            key = 0
            for token in tail[-self.width :]:
                key = key << BITS | token + 1
            yield from self._chain(self._latest.get(key, 0), most)

    def _chain(self, at: int, most: int) -> Iterator[int]:
        dropped, links = self.dropped, self._links
        while most and at >= dropped + self.width:
            yield at
            at = links[at - dropped]
            most -= 1

    def agreement(self, at: int, tail: list[int], most: int) -> int:
        """How many tokens before position `at` equal those at the end of `tail`, up to `most`."""
        text, here, there = self.text, at - self.dropped, len(tail)
        most = min(most, here, there)
        count = 0
        while count < most and text[here - count - 1] == tail[there - count - 1]:
            count += 1
        return count

    def drop(self, count: int) -> None:
        """Forget the oldest tokens. The caller drops many at once: what is left is moved."""
        end, key, latest = self.dropped + count, 0, self._latest
        for token in self.text[:count]:
            key = (key << BITS | token + 1) & self._mask
            if latest.get(key, end + 1) <= end:
                del latest[key]
        del self.text[:count], self._links[:count]
        self.dropped = end


def follow(index: TokenIndex, at: int, count: int) -> list[int]:
    """The tokens from position `at` on; past the end of the text, what was taken is repeated."""
    start = at - index.dropped
    taken = index.text[start : start + count]
    while 0 < len(taken) < count:
        taken.extend(taken[: count - len(taken)])
    return taken
