"""A rehearsal at load time: two short texts through a transformers model in steps, compared with one pass over each.

The logits of a single pass by transformers are the reference. The steps mix chunks and single tokens of two rows, over
keys and values cached in plain tensors; a layer that carries anything else between tokens, or takes positions from
elsewhere, gives different logits and is detected here, before any request is served.
Must not know: backends, blocks, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.hf_models.by_row import RowSpan
from quire.hf_models.taps import CallShape, RefusalError
from quire.layers.batch import AttentionPlan, Batch, LayerCache
from quire.ops.attention import padded_attention
from quire.schema.kv import KVKind

LENGTHS = (24, 17)
# (row, first position, count) of each step: chunks of both, a decode beside a chunk, chunks again, two decodes
STEPS = (((0, 0, 10), (1, 0, 9)), ((0, 10, 12), (1, 9, 1)), ((0, 22, 1), (1, 10, 6)), ((0, 23, 1), (1, 16, 1)))
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.12}


class TrialCache:
    """Keys and values of every layer and row of a rehearsal; also a RowMemory."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def grow(self, layer: str, row: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[Hkv, count, size] each -> all so far."""
        if (layer, row) in self._rows:
            before = self._rows[layer, row]
            k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        self._rows[layer, row] = k, v
        return k, v

    def read(self, layer: str, span: RowSpan) -> tuple[Tensor, Tensor]:
        k, v = self._rows[layer, span.row]
        return k[None], v[None]

    def write(self, layer: str, span: RowSpan, k: Tensor, v: Tensor) -> None:
        self.grow(layer, span.row, k[0], v[0])


class TrialPlan:
    """An attention plan over a TrialCache."""

    run_fused = None

    def __init__(self, trial_cache: TrialCache, layer: str, shape: CallShape, spans: list[RowSpan]) -> None:
        self._cache, self._layer, self._shape, self._spans = trial_cache, layer, shape, spans

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
        alibi: Tensor | None = None,
    ) -> Tensor:
        assert v is not None
        out = []
        for span in self._spans:
            here = slice(span.first, span.first + span.num_tokens)
            keys, values = self._cache.grow(self._layer, span.row, k[here].transpose(0, 1), v[here].transpose(0, 1))
            attended = padded_attention.reference(
                q[here].transpose(0, 1)[None], keys[None], values[None], self._mask(span, q.device),
                scale=scale, softcap=softcap, sinks=None if sinks is None else sinks[:, None],
            )  # fmt: skip
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)

    def _mask(self, span: RowSpan, device: torch.device) -> Tensor:
        q = torch.arange(span.start, span.start + span.num_tokens, device=device)[:, None]
        k = torch.arange(span.start + span.num_tokens, device=device)[None]
        seen, window = k <= q, self._shape.window
        if self._shape.kind is KVKind.WINDOW:
            seen = seen & (k > q - window)
        elif self._shape.kind is KVKind.CHUNK:
            seen = seen & (k // window == q // window)
        return torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf"))


class KeptSource:
    """Plans of one step of a rehearsal, for taps."""

    def __init__(self, trial_cache: TrialCache, spans: list[RowSpan], shapes: dict[str, CallShape]) -> None:
        self._cache, self._spans, self._shapes = trial_cache, spans, shapes

    def plan_of(self, layer: str, shape: CallShape | None) -> tuple[AttentionPlan, LayerCache | None]:
        return TrialPlan(self._cache, layer, shape or self._shapes[layer], self._spans), None


def step_of(texts: list[Tensor], step: Sequence[tuple[int, int, int]]) -> tuple[Batch, list[RowSpan]]:
    """One step of a rehearsal; its batch has no plans."""
    spans, first = [], 0
    for row, start, count in step:
        spans.append(RowSpan(row, start, count, first))
        first += count
    ids = torch.cat([texts[span.row][span.start : span.start + span.num_tokens] for span in spans])
    positions = [torch.arange(span.start, span.start + span.num_tokens, device=ids.device) for span in spans]
    return Batch(ids, torch.cat(positions), [], torch.arange(len(ids), device=ids.device), len(ids)), spans


def whole_step(text: Tensor) -> tuple[Batch, list[RowSpan]]:
    return step_of([text], ((0, 0, len(text)),))


def run_steps(texts: list[Tensor], run: Callable[[Batch, list[RowSpan], TrialCache], Tensor]) -> list[Tensor]:
    """Logits of every token of every text. `run` returns those of one step."""
    trial_cache = TrialCache()
    rows: list[list[Tensor]] = [[] for _ in texts]
    for batch, spans in (step_of(texts, step) for step in STEPS):
        logits = run(batch, spans, trial_cache)
        for span in spans:
            rows[span.row].append(logits[span.first : span.first + span.num_tokens].float())
    return [torch.cat(parts) for parts in rows]


def compare(expected: list[Tensor], actual: list[Tensor], dtype: torch.dtype) -> None:
    """RefusalError unless the steps give the logits of a single pass. Rounding may sometimes change a routed expert in
    half precision, so there the median token decides; in float32 every token does."""
    a, b = torch.cat(expected).float(), torch.cat(actual).float()
    if a.shape != b.shape or not torch.isfinite(b).all():
        raise RefusalError(f"in steps its logits have shape {list(b.shape)}, in a single pass {list(a.shape)}")
    error = (a - b).norm(dim=1) / (a - a.mean(1, keepdim=True)).norm(dim=1).clamp(min=1e-6)
    worst = float(error.max() if dtype is torch.float32 else error.median())
    if worst > TOLERANCE.get(dtype, 2e-3):
        raise RefusalError(
            f"in steps its logits differ from those of a single pass (relative difference {worst:.2g}), so it keeps or "
            "reads something besides keys, values and positions"
        )


def make_texts(vocab: int, forbidden: set[int], device: torch.device) -> list[Tensor]:
    """Fixed random tokens without special ones."""
    allowed = torch.tensor([i for i in range(min(vocab, 2000)) if i not in forbidden])
    order = torch.Generator().manual_seed(11)
    return [allowed[torch.randint(len(allowed), (n,), generator=order)].to(device) for n in LENGTHS]


def special_ids(config: dict[Any, Any]) -> set[int]:
    """Every named token id in a configuration, at any depth."""
    ids = set()
    for key, value in config.items():
        if isinstance(value, dict):
            ids |= special_ids(value)
        elif str(key).endswith(("token_id", "token_index", "token_ids")):
            ids |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return ids
