"""The progress bar of LLM's methods: prompts done, and tokens per second in and out. Nothing, if nobody wants one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.base import registry
from quire.base.clock import now
from quire.schema.errors import InputError
from quire.schema.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput

TQDM = "tqdm:tqdm"


class Progress:
    def __init__(self, bar: Any) -> None:
        self._bar = bar  # None: no bar
        self._began = now()
        self._num_in = self._num_out = 0

    @classmethod
    def make(cls, use_tqdm: bool | Callable[..., Any], *, total: int, words: str) -> Progress:
        """`use_tqdm` is a switch, or whatever builds a bar when called like tqdm."""
        if use_tqdm is False or (use_tqdm is True and sys.stderr is None):  # closed, as under some services
            return cls(None)
        if use_tqdm is not True and not callable(use_tqdm):
            raise InputError(f"use_tqdm must be a bool or build a bar when called, got {use_tqdm!r}", param="use_tqdm")
        build = registry.load(TQDM) if use_tqdm is True else use_tqdm
        return cls(build(total=total, desc=words, dynamic_ncols=True, postfix=_speed(0.0, 0.0)))

    def advance(self, results: Sequence[RequestOutput | PoolingRequestOutput[PoolingOutput] | None] = (None,)) -> None:
        """So many more prompts are done; None: nothing is known of its tokens."""
        if self._bar is None or not results:
            return
        for result in results:
            if isinstance(result, PoolingRequestOutput):
                self._num_in += len(result.prompt_token_ids)
            elif result is not None:
                self._num_in += len(result.prompt_token_ids or ()) * len(result.outputs)
                self._num_out += sum(len(output.token_ids) for output in result.outputs)
        if results[-1] is not None:
            seconds = max(now() - self._began, 1e-9)
            self._bar.postfix = _speed(self._num_in / seconds, self._num_out / seconds)
        self._bar.update(len(results))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _speed(num_in: float, num_out: float) -> str:
    return f"est. speed input: {num_in:.2f} toks/s, output: {num_out:.2f} toks/s"
