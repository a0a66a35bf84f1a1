"""Texts packed one after another for models that read a whole text at once: the input, and how its layers attend.

Texts are made by whoever serves such a model; plans by models/encoder.py, one per window, for one pass. Nothing is
kept between passes: no cache, no blocks. Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.batch import LayerCache
from quire.ops.attention import ragged_attention
from quire.ops.copy import upload
from quire.schema.errors import ConfigError, InputError


@dataclass(frozen=True)
class Texts:
    """Several texts without padding: [ text 0 | text 1 | ... ]."""

    token_ids: Tensor  # [T] int64
    lens: tuple[int, ...]  # tokens of each text; none is empty
    type_ids: Tensor | None = None  # [T] int64: which part of a pair a token belongs to; None: all zero
    places: Tensor | None = None  # [T] int64: where in its text a token stands; None: not known yet
    adapter_index: Tensor | None = None  # [T] int32: the slot of a token's adapter, 0: none; None: no text has one

    @classmethod
    def of(
        cls,
        texts: Sequence[Sequence[int]],
        *,
        types: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> Texts:
        lens = tuple(map(len, texts))
        if not lens or not all(lens):
            raise InputError(f"texts to encode must have tokens; lengths given: {list(lens)}", value=list(lens))
        if types is not None and tuple(map(len, types)) != lens:
            raise InputError(f"types of lengths {[len(t) for t in types]} for texts of lengths {list(lens)}")
        flat = torch.tensor([token for text in texts for token in text], device=device)
        kinds = None if types is None else torch.tensor([kind for text in types for kind in text], device=device)
        return cls(flat, lens, kinds)

    def positions(self) -> Tensor:
        """[T]: counted from 0 in every text."""
        if self.places is not None:
            return self.places
        lens = np.array(self.lens)
        return upload(np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens), self.token_ids.device)


class WithinPlan:
    """In Batch.plans: every token attends over all of its own text, in both directions."""

    run_fused = None

    def __init__(self, lens: Sequence[int], window: int) -> None:
        self.lens, self.window = lens, window

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,  # [Hq] slopes or [Hq, 2 G + 1] learned distances: ops/attention.ragged_attention
    ) -> Tensor:
        if v is None:
            raise ConfigError("latent attention is causal; a text read at once has none")
        return ragged_attention.on(q.device)(
            q, k, v, self.lens, self.lens, scale=scale, window=self.window, softcap=softcap, sinks=sinks, near=alibi
        )
