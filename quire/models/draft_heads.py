"""Draft heads: small networks that read one hidden state of a model and say which tokens may follow the next one.

In: hidden states [R, width] behind the model's final norm, the token that each of them led to, and how logits become
tokens. Out: token ids [R, count]. They have no keys and values: what they draft depends on that state (and, of MLP
speculators, on what they drafted before). Weights are loaded through a table. Must not know: files, rows, what verifies
their drafts.

    medusa          head i: h = x + silu(W x), some times; logits V_i h; heads do not see each other
    mlp_speculator  s = gelu(norm_i(P_i s + c E_i token)); logits V_i s, whose token is what head i + 1 embeds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.checkpoint.limits import WIDTH, Range, check_number
from quire.layers.embed import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.stored import finish_matrices
from quire.layers.table import WeightTable
from quire.ops.act import gelu, silu
from quire.quant.scheme import Slot, Storage
from quire.schema.errors import CheckpointError

MOST_HEADS = Range(1, 64)
MOST_LAYERS = Range(1, 64)
Logits = Callable[[Tensor], Tensor]
Choose = Callable[
    [Tensor, "TokenMap | None"], Tensor
]  # logits [R, v] -> token ids [R]; the map: of ids that are its own


class Heads(Protocol):
    """The interface of draft heads for the worker."""

    num_heads: int  # tokens that they draft at most
    width: int  # of the states they read
    storage: Storage

    def draft(self, states: Tensor, token_ids: Tensor, count: int, choose: Choose) -> Tensor: ...


class _DraftHeads(nn.Module):
    """What the loader needs of a model."""

    role = "drafter"
    names: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage

    def table(self) -> WeightTable:
        return WeightTable.of(self, names=self.names, ignore=self.ignore)

    def finish_weights(self) -> None:
        finish_matrices(self)


class TokenMap(nn.Module):
    """Ids of a drafter's own, smaller vocabulary -> token ids. `offsets`: how far a token's id is from its own."""

    def __init__(self, name: str, count: int, vocab: int, storage: Storage, *, offsets: bool) -> None:
        super().__init__()
        self.name, self._vocab, self._offsets = name, vocab, offsets
        self.entries = nn.Parameter(torch.zeros(count, dtype=torch.int64, device=storage.device), requires_grad=False)

    def forward(self, index: Tensor) -> Tensor:
        chosen = self.entries[index]
        return index + chosen if self._offsets else chosen

    def slots(self) -> Iterator[Slot]:
        yield Slot(self.name, self.entries.data)

    def check(self) -> None:
        """CheckpointError: an entry leads out of the vocabulary."""
        ids = self(torch.arange(len(self.entries), device=self.entries.device))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
            raise CheckpointError(
                f"tensor {self.name!r} names the tokens {int(ids.min())} to {int(ids.max())}; the vocabulary has "
                f"{self._vocab}",
                param=self.name,
            )


class MedusaHeads(_DraftHeads):
    def __init__(
        self,
        raw: Mapping[str, Any],
        there: Collection[str],
        width: int,
        vocab: int,
        logits: Logits,
        storage: Storage,
    ) -> None:
        """`raw`: its configuration; `there`: names of the checkpoint's tensors; `logits`: of the model's own head, for
        checkpoints that have none."""
        super().__init__(storage)
        self.num_heads, depth = raw["num_heads"], raw["num_hidden_layers"]
        check_number("num_heads", self.num_heads, MOST_HEADS)
        check_number("num_hidden_layers", depth, MOST_LAYERS)
        self.width = width
        self.names = (
            (r"^medusa_heads?\.", ""),
            (rf"^(\d+)\.{depth}\.weight$", r"lm_heads.\1.weight"),
            (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        )
        canonical = {WeightTable((), names=self.names).canonical(name) for name in there}
        bias = "blocks.0.layers.0.bias" in canonical
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                Linear(f"blocks.{i}.layers.", width, {str(j): width}, storage, bias=bias) for j in range(depth)
            )
            for i in range(self.num_heads)
        )
        own = min(raw.get("truncated_vocab_size") or vocab, vocab)
        shared = "lm_head.weight" in canonical
        count = 1 if shared else self.num_heads if not there or "lm_heads.0.weight" in canonical else 0
        self.heads = nn.ModuleList(
            Head("lm_head" if shared else f"lm_heads.{i}", own, width, storage) for i in range(count)
        )
        self.map = TokenMap("token_map", own, vocab, storage, offsets=False) if count and own < vocab else None
        self._logits, self._silu = logits, storage.of(silu)

    def draft(self, states: Tensor, token_ids: Tensor, count: int, choose: Choose) -> Tensor:
        return torch.stack([choose(self._logits_of(i, states), self.map) for i in range(min(count, self.num_heads))], 1)

    def _logits_of(self, i: int, x: Tensor) -> Tensor:
        layers = self.blocks[i]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = x + self._silu(layer(x))
        logits: Tensor = self.heads[min(i, len(self.heads) - 1)](x) if len(self.heads) else self._logits(x)
        return logits

    def finish_weights(self) -> None:
        super().finish_weights()
        if self.map is not None:
            self.map.check()


class _ShiftedNorm(nn.Module):
    """x / rms(x), then a learned factor and shift. Without a name it has neither."""

    def __init__(self, name: str, width: int, storage: Storage) -> None:
        super().__init__()
        self.name = name
        self.weight = storage.parameter(width) if name else None
        self.bias = storage.parameter(width) if name else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x if self.weight is None or self.bias is None else x * self.weight + self.bias

    def slots(self) -> Iterator[Slot]:
        for leaf, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                yield Slot(f"{self.name}.{leaf}", parameter.data)


class MlpSpeculator(_DraftHeads):
    def __init__(self, raw: Mapping[str, Any], width: int, vocab: int, storage: Storage) -> None:
        """`width`: of the model's states."""
        super().__init__(storage)
        self.num_heads, self.width = raw["n_predict"], width
        inner = raw.get("inner_dim") or width
        check_number("n_predict", self.num_heads, MOST_HEADS)
        check_number("inner_dim", inner, WIDTH)
        is_tied = bool(raw.get("tie_weights", False))
        own = 1 if is_tied else self.num_heads  # of each kind but the projections
        rest = min(2, self.num_heads) if is_tied else self.num_heads
        self.names = ((r"^(emb|proj|head|ln)\.", r"speculator.\1."),)
        if is_tied:  # heads after the first are the first again, projections after the second the second
            self.names += (
                (r"^speculator\.(emb|head|ln)\.\d+\.", r"speculator.\1.0."),
                (r"^speculator\.proj\.[1-9]\d*\.", "speculator.proj.1."),
            )
        self.emb = nn.ModuleList(Embedding(f"speculator.emb.{i}", vocab, inner, storage) for i in range(own))
        self.proj = nn.ModuleList(
            Linear("speculator.proj.", width if i == 0 else inner, {str(i): inner}, storage) for i in range(rest)
        )
        self.head = nn.ModuleList(Head(f"speculator.head.{i}", vocab, inner, storage) for i in range(own))
        self.norms = nn.ModuleList(_ShiftedNorm(f"speculator.ln.{i}", inner, storage) for i in range(own))
        self.first_norm = _ShiftedNorm("", width, storage) if raw.get("scale_input") else None
        state_weight = 0.5 ** (0.5 / self.num_heads)
        self._share = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        self._gelu = storage.of(gelu)

    def draft(self, states: Tensor, token_ids: Tensor, count: int, choose: Choose) -> Tensor:
        tokens: list[Tensor] = []
        if self.first_norm is not None:
            states = self.first_norm(states) / math.sqrt(2)
        for i in range(min(count, self.num_heads)):
            embedded = self.emb[min(i, len(self.emb) - 1)](token_ids)
            states = self.proj[min(i, len(self.proj) - 1)](states) + self._share * embedded
            states = self._gelu(self.norms[min(i, len(self.norms) - 1)](states))
            token_ids = choose(self.head[min(i, len(self.head) - 1)](states), None)
            tokens.append(token_ids)
        return torch.stack(tokens, 1)
