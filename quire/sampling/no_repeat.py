"""No run of tokens twice within a window of the answer, as a request asks for: what OCR models need on long tables.

`extra_args`: ngram_size (a run's tokens), window_size (tokens back from the end that are searched; 100) and
whitelist_token_ids, which may always follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.sampling.processors import AdapterLogitsProcessor, RequestLogitsProcessor
from quire.schema.errors import InputError
from quire.schema.params import ResolvedParams, SamplingParams

if TYPE_CHECKING:
    import torch

_WINDOW = 100
_LIMITS = {"ngram_size": 256, "window_size": 8192}
_MOST_ALLOWED = 4096  # tokens of the list


class NoRepeat(NamedTuple):
    size: int
    window: int
    allowed: frozenset[int]

    def banned(self, output_ids: list[int]) -> list[int]:
        """Tokens that would end a run which the window has."""
        if len(output_ids) < self.size:
            return []
        start = output_ids[len(output_ids) - self.size + 1 :]
        first = max(0, len(output_ids) - self.window)
        last = len(output_ids) - self.size + 1
        begins: Sequence[int] = range(first, last)
        if start:  # most differ in the token before the end already
            begins = [at for at in begins if output_ids[at + self.size - 2] == start[-1]]
        ends = {output_ids[at + self.size - 1] for at in begins if output_ids[at : at + self.size - 1] == start}
        return sorted(ends - self.allowed)

    def apply(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if banned := self.banned(output_ids):
            logits[banned] = -float("inf")
        return logits


class NGramPerReqLogitsProcessor(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        read(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: ResolvedParams) -> RequestLogitsProcessor | None:
        rule = read(params.extra_args)
        return None if rule is None else rule.apply


def read(extra: Mapping[str, Any] | None) -> NoRepeat | None:
    """None: a request that does not ask for it."""
    extra = extra or {}
    size = extra.get("ngram_size")
    if size is None:
        return None
    window = extra.get("window_size")
    sizes = {"ngram_size": size, "window_size": _WINDOW if window is None else window}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _LIMITS[name]:
            raise InputError(
                f"{name} of extra_args is {value!r:.60}; expected a whole number from 1 to {_LIMITS[name]}",
                param="extra_args",
            )
    allowed = extra.get("whitelist_token_ids") or ()
    is_list = isinstance(allowed, list | tuple | set | frozenset) and len(allowed) <= _MOST_ALLOWED
    if not is_list or any(type(token) is not int or token < 0 for token in allowed):
        raise InputError(
            f"whitelist_token_ids of extra_args is {allowed!r:.60}; expected up to {_MOST_ALLOWED} token ids",
            param="extra_args",
        )
    return NoRepeat(sizes["ngram_size"], sizes["window_size"], frozenset(allowed))
