"""Stop strings in streamed text: where the first one ends, and how much of the end of the text may still become one.

In: text in chunks. The result never depends on the chunk boundaries: the stop string that
is complete first wins, and of two that end together the longer one. Cost is proportional to the new text.
Must not know: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    stop: str
    end: int  # in the new text, just past the stop string


class StopStrings:
    """Searches for several strings at once, each with an automaton whose state is the matched prefix."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._watches = [_Watch(stop) for stop in dict.fromkeys(stops)]

    def feed(self, text: str, *, armed: bool = True) -> Match | None:
        """Continue with `text`. Not armed: strings that become complete here are ignored. A match ends the search."""
        best: Match | None = None
        for watch in self._watches:
            end = watch.feed(text, armed)
            if end is not None and (best is None or (-end, len(watch.stop)) > (-best.end, len(best.stop))):
                best = Match(watch.stop, end)
        return best

    @property
    def held(self) -> int:
        """How many characters at the end of the text could be the start of a stop string."""
        return max((watch.state for watch in self._watches), default=0)


class _Watch:
    """Knuth, Morris and Pratt: `state` characters of `stop` are the end of the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._back = [0] * len(stop)  # longest proper prefix that is also a suffix, for each length
        state = 0
        for index in range(1, len(stop)):
            while state and stop[index] != stop[state]:
                state = self._back[state - 1]
            if stop[index] == stop[state]:
                state += 1
            self._back[index] = state

    def feed(self, text: str, armed: bool) -> int | None:
        stop, back, state = self.stop, self._back, self.state
        start = 0
        if not state:
            start = text.find(stop[0])
            if start < 0:
                return None
        for index in range(start, len(text)):
            char = text[index]
            while state and char != stop[state]:
                state = back[state - 1]
            if char == stop[state]:
                state += 1
                if state == len(stop):
                    state = back[state - 1]
                    if armed:
                        self.state = state
                        return index + 1
        self.state = state
        return None
