"""The standard rejection rule: the token of a place whose draft was drawn from a known distribution.

In: final logits of such places, the drafts, and what they were drawn from. A draft x of distribution q is kept with
probability min(1, p(x) / q(x)), p being what the row would be sampled from; otherwise the token is drawn from what p
has more than q. Either way it is distributed as p, whatever q is. Each place uses three independent random numbers of
its (seed, position): of the draft, of the decision, and of the draw, which is the one that a row without drafts uses.
So a place is decided by nothing that an earlier decision has seen. Must not know: rows, grants, who drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops import sample

_DRAFTED = 0x5851F42D4C957F2D  # added to a seed: noise of drafts
_DECIDED = 0x14057B7EF767814F  # and of decisions about them


class DrawnDrafts(NamedTuple):
    """Drafts of one step that were drawn, in the order of their places."""

    places: Tensor  # [D] int64: places of the step that sample, as the sampler counts them
    token_ids: Tensor  # [D] int64
    probabilities: Tensor  # [D, V] float32: what each was drawn from


def draw_drafts(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] int64: a draft for each row of [n, V]."""
    return sample.sample_(probabilities.log(), seeds + _DRAFTED, positions)


def decide(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    """[D] int64: the draft where it is kept, else another token. `logits` [D, V]: after all filters; left alone."""
    p, q = torch.softmax(logits, -1), drafts.probabilities
    chosen = drafts.token_ids.unsqueeze(1)
    share = sample.uniform(seeds + _DECIDED, positions)
    is_known = q.isfinite().all(-1, keepdim=True)  # else the drafter is broken, and its draft says nothing
    keeps = share * q.gather(1, chosen).squeeze(1) < p.gather(1, chosen).squeeze(1)
    keeps &= is_known.squeeze(1)
    rest = torch.where(is_known, (p - q).clamp(min=0), p)
    none_left = rest.sum(-1, keepdim=True) <= 0  # p is q, up to rounding
    drawn = sample.sample_(torch.where(none_left, p, rest).log_(), seeds, positions)
    return torch.where(keeps, drafts.token_ids, drawn)
