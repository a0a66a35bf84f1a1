"""Token ids that belong to a modality: their vectors come from a table of the modality's encoder, normalised and
projected to the width of the language model, and not from the table of words. Must not know: encoders, media.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.embed import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind
from quire.quant.scheme import Storage


@dataclass(frozen=True)
class ModalityTokensKind:
    name: str  # canonical name of the module
    first: int  # the first id
    end: int  # the first id behind them
    rows: int
    width: int  # of a vector of the table
    eps: float


class ModalityTokens(nn.Module):
    def __init__(self, kind: ModalityTokensKind, width: int, storage: Storage) -> None:
        super().__init__()
        self.kind = kind
        norm = NormKind(eps=kind.eps, wide=True)
        self.table = Embedding(f"{kind.name}.embedding", kind.rows, kind.width, storage)
        self.norm = Norm(f"{kind.name}.hard_embedding_norm", (kind.width,), norm, storage)
        self.project = Linear(f"{kind.name}.", kind.width, {"embedding_projection": width}, storage)
        bare = NormKind(eps=kind.eps, weight=False, wide=True)
        self.out_norm = Norm(f"{kind.name}.embedding_post_projection_norm", (width,), bare, storage)

    def forward(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """x [T, width], with the vectors of this modality's tokens in their places."""
        kind = self.kind
        is_own = (token_ids >= kind.first) & (token_ids < kind.end)
        own = self.table((token_ids - kind.first).clamp(0, kind.rows - 1))
        return torch.where(is_own[:, None], self.out_norm(self.project(self.norm(own))).to(x.dtype), x)
