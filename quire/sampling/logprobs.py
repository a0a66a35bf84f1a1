"""From log probabilities (or logits) of positions to the rows that go back to the engine.

Owns: which entries a row has, and their order: the chosen (or given) token, then the k largest, then the ids asked for
by name (`logprob_token_ids`). Lists are made late, by `Picked.rows`, so a step need not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops import sample
from quire.ops.copy import download
from quire.schema.step import LogprobRows

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


class LogprobRequest(NamedTuple):
    """What some rows of one step want to see: the k largest (the whole vocabulary: k = V), and named ids."""

    where: Tensor  # [m] int64, into the step's sampled rows
    places: tuple[int, ...]  # the same on the host
    k: int
    ids: Tensor | None  # [e] int64


@dataclass
class Picked:
    """Entries of m positions, still as tensors."""

    token_ids: Tensor  # [m, 1 + k + e] int64
    values: Tensor  # [m, 1 + k + e]
    ranks: Tensor  # [m] int64

    def on_host(self) -> Picked:
        """The same on its way to the host; complete once the device has passed this point."""
        return Picked(download(self.token_ids), download(self.values), download(self.ranks))

    def rows(self) -> LogprobRows:
        return LogprobRows(self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist())


def pick(values: Tensor, chosen: Tensor, k: int, ids: Tensor | None = None) -> Picked:
    """values [m, V] (log probabilities or logits), chosen [m]."""
    picked_ids, picked, ranks = sample.chosen_and_top.on(values.device)(values, chosen, k)
    if ids is not None:
        picked = torch.cat((picked, values[:, ids]), 1)
        picked_ids = torch.cat((picked_ids, ids.expand(values.shape[0], -1)), 1)
    return Picked(picked_ids, picked, ranks)


def values_of(logits: Tensor, mode: str) -> Tensor:
    """What a mode reports of these logits. A copy, or a new tensor: the logits may change afterwards."""
    return logits.clone() if mode.endswith("logits") else sample.log_probs.on(logits.device)(logits)


def join(pieces: list[LogprobRows]) -> LogprobRows:
    """Consecutive pieces as one."""
    return LogprobRows(
        [row for piece in pieces for row in piece.token_ids],
        [row for piece in pieces for row in piece.logprobs],
        [rank for piece in pieces for rank in piece.ranks],
    )
