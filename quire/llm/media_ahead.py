"""Media of a list of prompts, processed in worker threads while the prompts before them are prepared.

In: prompts as a caller gives them. Out: the same, in their order, those with media with what became of these. Whatever
is wrong with a prompt is told when its own turn comes. Must not know: engines, parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.engine.inputs import InputProcessor, has_items
from quire.schema.errors import QuireError
from quire.schema.prompt import Prompt

AHEAD = 32  # prompts whose media are processed at once, or wait for their turn


def load_ahead(inputs: InputProcessor, prompts: Sequence[Any]) -> Iterator[Any]:
    begun: deque[tuple[Any, dict[str, list[Future[Any]]] | None]] = deque()
    try:
        for at in range(len(prompts)):
            while len(begun) < AHEAD and at + len(begun) < len(prompts):
                begun.append(_begin(inputs, prompts[at + len(begun)]))
            prompt, futures = begun.popleft()
            if futures is not None:
                prompt = msgspec.structs.replace(prompt, media=(), loaded_media=inputs.media.loaded(futures))
            yield prompt
    finally:
        for _, left in begun:
            for future in (one for several in (left or {}).values() for one in several):
                future.cancel()


def _begin(inputs: InputProcessor, source: Any) -> tuple[Any, dict[str, list[Future[Any]]] | None]:
    try:
        prompt = Prompt.of(source)
        if not prompt.media or has_items(prompt) or inputs.media.known(prompt.loaded_media or prompt.media) is not None:
            return source, None
        return prompt, inputs.begin_media(prompt)
    except QuireError:  # which it will meet again
        return source, None
