"""Vectors of texts that lie one after another: their sums, text by text.

In: [T, width] of any dtype and the lengths of the texts. Out: float32. A text's sum does not depend on what lies beside
it. Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.op import op


@op
def text_sums(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[T, width] -> [texts, width] float32; counts: the rows of each text, all of T together."""
    return torch.stack([rows.float().sum(0) for rows in x.split(list(counts))])
