"""What ranks that divide contexts among themselves do around attention, on any device: which of a step's tokens a rank
keeps, queries of all their heads, and one result from what each found among its own keys.

Must not know: kernels, caches, requests, how ranks talk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.attention import merge_attention
from quire.quant.shard import ContextRanks


def own_slots(slots: Tensor, block_size: int, ranks: ContextRanks) -> Tensor:
    """Slots of the scheduler's blocks -> those of this rank's share of them; -1: it does not keep the token."""
    blocks, offsets = slots // block_size, slots % block_size
    turns, places = offsets // ranks.interleave, offsets % ranks.interleave
    own = blocks * (block_size // ranks.size) + turns // ranks.size * ranks.interleave + places
    return torch.where((slots >= 0) & (turns % ranks.size == ranks.rank), own, -1)


def all_heads(x: Tensor, ranks: ContextRanks) -> Tensor:
    """x [own heads, ..] -> those of all ranks."""
    return ranks.gather(x.contiguous()).flatten(0, 1)


def merged(out: Tensor, totals: Tensor, heads: int, ranks: ContextRanks, sinks: Tensor | None) -> Tensor:
    """Of all ranks' heads over this rank's keys, `out` [Hq, T, Dv] and `totals` [Hq, T] as `partial_attention` has
    them -> of this rank's `heads`, over all keys. `out` is used up."""
    shape = (ranks.size, heads)
    if ranks.by_exchange:
        parts = ranks.exchange(torch.cat((out, totals[..., None]), -1).unflatten(0, shape))
        whole, weight = merge_attention(parts[..., :-1], parts[..., -1])
    else:
        total = ranks.gather(totals.contiguous()).logsumexp(0)
        weights = (totals - total.clamp(min=torch.finfo(torch.float32).min)).exp_()
        whole = ranks.scatter(out.mul_(weights[..., None]).unflatten(0, shape))  # as large as all heads' results
        weight = total[ranks.rank * heads : (ranks.rank + 1) * heads]
    if sinks is None:
        return whole
    # a key without a value, that no rank keeps
    return whole * torch.sigmoid(weight - sinks.float()[:, None])[..., None]
