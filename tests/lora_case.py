"""Steps whose rows have adapters of many ranks, as the op takes them, and what they come to, computed in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from quire.ops.lora import AdapterRows, LowRank, LowRankPiece


class LowRankCase:
    """A matrix of some parts, four slots: all parts; the second part alone; the whole as one; nothing."""

    def __init__(
        self, index: list[int], dtype: torch.dtype, device: str = "cpu", rank: int = 8, *, stacked: bool = True,
        stored: torch.dtype | None = None,  # dtype of the adapters
        parts: tuple[int, ...] = (130, 40, 40), width: int = 300, as_columns: bool = False,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=draw) * 0.5).to(dtype)

        ends = (0, *accumulate(parts))
        spans, whole = list(pairwise(ends)), ends[-1]
        kinds = [
            [(*span, size, scale) for span, size, scale in zip(spans, (4, 8, 1), (1.0, 0.5, 2.0), strict=False)],
            [(*spans[1], rank, 3.0)],
            [(0, whole, 3, 0.25)],
            [],
        ]
        self.slots = [
            tuple(
                LowRankPiece(s, e, random(r, width).to(stored or dtype), random(e - s, r).to(stored or dtype), scale)
                for s, e, r, scale in kind
            )
            for kind in kinds
        ]
        self.x, self.y = random(len(index), width).to(device), random(len(index), whole).to(device)
        self.rows = AdapterRows(torch.tensor(index, dtype=torch.int32, device=device))
        self.low = LowRank(len(kinds), stored or dtype)
        if stacked:
            like = torch.empty(0, dtype=dtype, device=device)
            self.low.set_up_stacks(parts, width, rank, like, as_columns=as_columns)
        for slot, pieces in enumerate(self.slots, 1):
            self.low.put(slot, pieces)

    def expected(self, y: torch.Tensor | None = None) -> torch.Tensor:
        """What is added to y; None: to the case's own."""
        y, x = (self.y if y is None else y).cpu().double().clone(), self.x.cpu().double()
        for row, slot in enumerate(self.rows.index.tolist()):
            for start, stop, a, b, scale in self.slots[slot - 1] if slot else ():
                y[row, start:stop] += scale * (b.double() @ (a.double() @ x[row]))
        return y


MIXES = {
    "decodes": [0, 1, 2, 3, 4, 1, 0, 2],
    "one row": [1],
    "base alone": [0, 0, 0],
    "runs": [1, 1, 1, 3, 3, 0, 0, 2],
    "everything": [slot % 5 for slot in range(40)],
}
