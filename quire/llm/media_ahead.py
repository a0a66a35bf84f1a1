"""Media of a list of prompts, processed in worker threads while the prompts before them are prepared and run.

In: prompts as a caller gives them. Out: the same, in their order, those with media with what became of these. Whatever
is wrong with a prompt is told when its own turn comes. Must not know: engines, parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from quire.engine.inputs import InputProcessor, has_items
from quire.schema.errors import OverloadedError, QuireError
from quire.schema.prompt import Prompt

AHEAD = 32  # prompts whose media are processed at once, or wait for their turn


class _LoadingPrompt(NamedTuple):
    prompt: Any
    futures: dict[str, list[Future[Any]]] | None  # None: it has no media, or what is wrong with them is told later

    def all(self) -> list[Future[Any]]:
        return [one for several in (self.futures or {}).values() for one in several]


class MediaAhead:
    """An iterator over prompts."""

    def __init__(self, inputs: InputProcessor, prompts: Sequence[Any]) -> None:
        self._inputs, self._left = inputs, deque(prompts)
        self._begun: deque[_LoadingPrompt] = deque()
        self._fill()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            raise StopIteration
        prompt, futures = self._begun.popleft()
        if futures is None:
            self._fill()
            return prompt
        loaded = self._inputs.media.loaded(futures)
        self._fill()
        return msgspec.structs.replace(prompt, media=(), loaded_media=loaded)

    @property
    def is_ready(self) -> bool:
        """Whether the next one is there without waiting, or there is none."""
        return not self._begun or all(future.done() for future in self._begun[0].all())

    def close(self) -> None:
        """What has not begun will not."""
        for one in self._begun:
            for future in one.all():
                future.cancel()
        self._begun.clear()
        self._left.clear()

    def _fill(self) -> None:
        while self._left and len(self._begun) < AHEAD:
            try:
                self._begun.append(self._begin(self._left[0]))
            except OverloadedError:
                if self._begun:  # the queue has room again when theirs are done
                    return
                self._begun.append(_LoadingPrompt(self._left[0], None))  # too many by itself, as it will be told
            self._left.popleft()

    def _begin(self, source: Any) -> _LoadingPrompt:
        try:
            prompt = Prompt.of(source)
            media = prompt.loaded_media or prompt.media
            is_loaded = has_items(prompt) or self._inputs.media.known(media) is not None
            if not prompt.media or is_loaded or _names_others(media):
                return _LoadingPrompt(source, None)
            return _LoadingPrompt(prompt, self._inputs.begin_media(prompt))
        except OverloadedError:
            raise
        except QuireError:  # which it will meet again
            return _LoadingPrompt(source, None)


def _names_others(media: Any) -> bool:
    """Whether an item is only named by its uuid: the prompts before may have to bring it."""
    values = media.values() if isinstance(media, Mapping) else ()
    return any(one is None for value in values for one in (value if isinstance(value, list | tuple) else [value]))
