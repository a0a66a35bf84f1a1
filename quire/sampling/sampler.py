"""Sampler: logits of the rows that sample in a step -> one token each, and the log probabilities that were asked for.

Owns: the greedy exit, the draw, which values log probabilities are taken from (`logprobs_mode`), and writing each token
into its row, where the next step reads it. The order of everything before the choice is pipeline.py's.
Must not know: grants, blocks, the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.ops import sample
from quire.sampling.custom import CustomSteps
from quire.sampling.logprobs import MODES, LogprobRequest, Picked, pick, values_of
from quire.sampling.pipeline import Pipeline, StepRows
from quire.sampling.processors import BatchUpdate, MoveDirectionality, load_classes
from quire.sampling.rows import RANDOM, TOP_K, TOP_P, SamplingRows, Selection, columns_of
from quire.schema.errors import ConfigError
from quire.schema.step import NewRow

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.sampling.rejection import DrawnDrafts


PLAIN = RANDOM | TOP_K | TOP_P
FILTERS = TOP_K | TOP_P
_WORDS = 5  # int32 words of a row: two of the seed, temperature, top_p, top_k


@dataclass
class SampledTokens:
    """What came of one step, still on the device. Everything is in the order of the rows given."""

    token_ids: Tensor  # [S] int64
    scores: Tensor  # [S]: what the chosen token had in the end; NaN or -inf means that nothing could be chosen
    logprobs: list[tuple[LogprobRequest, Picked]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # batch row -> why a custom processor lost it


class Sampler:
    def __init__(self, config: EngineConfig, vocab_size: int, tokens: Tensor) -> None:
        """`tokens` [max_rows, width] int32: the rows' tokens; this writes what it chose, others write the rest."""
        self.mode = config.model_config.logprobs_mode
        if self.mode not in MODES:
            raise ConfigError(
                f"logprobs_mode is {self.mode!r}; it must be one of {', '.join(MODES)}", param="logprobs_mode"
            )
        self.rows = SamplingRows(vocab_size, tokens.shape[0], tokens.device)
        classes = load_classes(config.model_config.logits_processors)
        self.custom = CustomSteps(classes, config, tokens.device) if classes else None
        self._pipeline = Pipeline(self.custom, tokens)
        self.plain = PlainSampler(self.rows, tokens)
        choose = sample.draw.on(tokens.device)
        self._choose = None if choose is sample.draw.reference or self.custom else choose  # one call for all rows
        self._tokens = tokens
        self._outputs: list[list[int]] = [[] for _ in range(tokens.shape[0] if self.custom else 0)]
        self._unseen: tuple[list[int], Tensor] | None = None  # rows and tokens not yet in the output lists

    def update(
        self,
        removed: Sequence[int],
        added: Sequence[tuple[int, NewRow]],
        moved: Sequence[tuple[int, int]],
        num_rows: int,
    ) -> dict[int, str]:
        """Once per step, before its logits: how the batch changed. Returns row -> why a custom processor lost it."""
        for row in removed:
            self.rows.remove(row)
        for row, new in added:
            self.rows.add(row, new)
        for source, target in moved:
            self.rows.move(source, target)
        if self.custom is None:
            return {}
        self._tell_custom(removed, added, moved, num_rows)
        return self.custom.take_failures()

    def plain_needs(self, rows: np.ndarray) -> int | None:
        """What `plain` must do for these rows; None: they need the whole pipeline."""
        return None if self.custom else self.plain.needs_of(rows)

    def takes_any_dtype(self, rows: np.ndarray) -> bool:
        """Whether logits of these rows may come as the model made them, because nothing but the choice reads them."""
        return self._choose is not None and self.plain_needs(rows) is not None

    def __call__(
        self,
        logits: Tensor,  # [S, V] float32, or what takes_any_dtype allows; changed
        rows: np.ndarray,  # [S] int64: batch rows, rising
        positions: np.ndarray,  # [S] int64: where in its row each new token will stand
        *,
        num_rows: int,
        mask: tuple[Tensor, Tensor] | None = None,
        drafts: DrawnDrafts | None = None,  # of rows that draw
    ) -> SampledTokens:
        chosen = self.rows.select(rows)
        step = StepRows(positions, self.rows.upload(positions), num_rows, mask)
        raw = self.mode.startswith("raw")
        final: Tensor | None = None  # [S, V]: what tokens were chosen from
        seen = [values_of(logits[ask.where], self.mode) for ask in chosen.asks] if raw else []
        if chosen.adjusts or mask is not None or self.custom is not None:
            logits = self._pipeline.adjust(logits, chosen, step)
        if self._choose is not None:
            if chosen.columns is None:
                chosen.columns = columns_of(self.rows, rows)
            token_ids, scores = self._choose(logits, chosen.columns[0], step.places, *chosen.columns[1])
            if drafts is not None or (chosen.asks and not raw):
                final = self._narrowed(logits, chosen, step)
                seen = seen if raw else [values_of(final[ask.where], self.mode) for ask in chosen.asks]
        elif chosen.num_random == 0:
            seen = seen if raw else [values_of(logits[ask.where], self.mode) for ask in chosen.asks]
            token_ids = sample.greedy(logits)
            scores = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        else:
            keep = drafts is not None or (not raw and bool(chosen.asks))
            token_ids, scores, final = self._draw(logits, chosen, step, keep)
            if final is not None and not raw:
                seen = [values_of(final[ask.where], self.mode) for ask in chosen.asks]
        if drafts is not None and final is not None:
            self._decide(drafts, final, rows, step, token_ids, scores)
        self._tokens[chosen.row_index, step.places] = token_ids.to(self._tokens.dtype)
        picked = [(a, pick(v, token_ids[a.where], a.k, a.ids)) for a, v in zip(chosen.asks, seen, strict=True)]
        if self.custom is not None:
            self._unseen = rows.tolist(), token_ids
            return SampledTokens(token_ids, scores, picked, self.custom.take_failures())
        return SampledTokens(token_ids, scores, picked)

    def _decide(
        self, drafts: DrawnDrafts, final: Tensor, rows: np.ndarray, step: StepRows, token_ids: Tensor, scores: Tensor
    ) -> None:
        """At the places of these drafts tokens are chosen by the rejection rule."""
        from quire.sampling.rejection import decide  # lazy

        at, logits = drafts.places, final[drafts.places]
        seeds = self.rows.upload(self.rows.seed[rows])[at]
        decided = decide(logits, drafts, seeds, step.places[at])
        token_ids[at] = decided
        scores[at] = logits.gather(1, decided.unsqueeze(1)).squeeze(1).to(scores.dtype)

    def _narrowed(self, logits: Tensor, chosen: Selection, step: StepRows) -> Tensor:
        """What tokens were chosen from."""
        if chosen.num_random == 0:
            return logits
        if chosen.random is None:
            return self._pipeline.narrow(logits, chosen, step)
        logits[chosen.random] = self._pipeline.narrow(logits[chosen.random], chosen, step)
        return logits

    def _draw(
        self, logits: Tensor, chosen: Selection, step: StepRows, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows that draw and rows that do not, in one batch. `keep`: also return the logits before the noise."""
        assert chosen.seeds is not None
        if chosen.random is None:
            drawn = self._pipeline.narrow(logits, chosen, step)
            processed = drawn.clone() if keep else None
            token_ids = sample.sample_(drawn, chosen.seeds, step.places)
            return token_ids, drawn.gather(1, token_ids.unsqueeze(1)).squeeze(1), processed
        token_ids = sample.greedy(logits)
        scores = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        drawn = self._pipeline.narrow(logits[chosen.random], chosen, step)
        if keep:
            logits[chosen.random] = drawn
        own = sample.sample_(drawn, chosen.seeds, step.places[chosen.random])
        token_ids[chosen.random] = own
        scores[chosen.random] = drawn.gather(1, own.unsqueeze(1)).squeeze(1)
        return token_ids, scores, logits if keep else None

    def _tell_custom(
        self,
        removed: Sequence[int],
        added: Sequence[tuple[int, NewRow]],
        moved: Sequence[tuple[int, int]],
        num_rows: int,
    ) -> None:
        """Let the output lists grow by what was sampled, then follow the batch, then tell the processors."""
        if self._unseen is not None:
            rows, token_ids = self._unseen
            for row, token in zip(rows, token_ids.tolist(), strict=True):
                self._outputs[row].append(token)
            self._unseen = None
        entries = []
        for row in removed:
            self._outputs[row] = []
        for row, new in added:
            ids = list(new.token_ids)
            self._outputs[row] = ids[new.num_prompt_tokens :]
            entries.append((row, new.sampling, ids[: new.num_prompt_tokens], self._outputs[row]))
        for source, target in moved:
            self._outputs[target], self._outputs[source] = self._outputs[source], []
        one_way = [(source, target, MoveDirectionality.UNIDIRECTIONAL) for source, target in moved]
        changed = bool(removed or entries or one_way)
        assert self.custom is not None
        self.custom.update(BatchUpdate(num_rows, list(removed), entries, one_way) if changed else None, num_rows)


class PlainSampler:
    """The choice for rows that need only the best token, or a draw after temperature, top_k and top_p.

    Their parameters are columns on the device, sent again when a row changed, and everything is decided there: nothing
    is read back and no shape depends on what a row asks for, so this also runs inside a graph. Rows that need more go
    through the whole pipeline. The last column belongs to padding: greedy.
    """

    def __init__(self, rows: SamplingRows, tokens: Tensor) -> None:
        """`tokens` [max_rows + 1, width] int32: the rows' tokens; the choice is written there."""
        self._rows, self._tokens = rows, tokens
        self._count = tokens.shape[0]
        self._words = torch.zeros(_WORDS * self._count, dtype=torch.int32, device=tokens.device)
        self.seeds = self._words[: 2 * self._count].view(torch.int64)
        self.temperature, self.top_p = (self._column(i).view(torch.float32) for i in (2, 3))
        self.top_k = self._column(4)
        self._choose = sample.sample_rows.on(tokens.device)
        self._is_new = True

    def _column(self, i: int) -> Tensor:
        return self._words[i * self._count : (i + 1) * self._count]

    def needs_of(self, rows: np.ndarray) -> int | None:
        """None: these rows need more than the plain choice. Else which of its parts they use."""
        used = int(np.bitwise_or.reduce(self._rows.flags[rows])) if rows.size else 0
        return None if used & ~PLAIN else used

    def refresh(self) -> None:
        """Send the columns, if a row changed since the last time."""
        if not (self._rows.take_changed() or self._is_new):
            return
        self._is_new = False
        rows, flags, n = self._rows, self._rows.flags, self._count
        sent = torch.empty(_WORDS * n, dtype=torch.int32, pin_memory=self._words.device.type != "cpu")
        words = sent.numpy()
        words[: 2 * n].view(np.int64)[:] = rows.seed
        words[2 * n : 3 * n].view(np.float32)[:] = np.where(flags & RANDOM, rows.temperature, 0.0)
        words[3 * n : 4 * n].view(np.float32)[:] = np.where(flags & TOP_P, rows.top_p, 1.0)
        words[4 * n :] = np.where(flags & TOP_K, rows.top_k, 0)
        self._words.copy_(sent, non_blocking=True)

    def __call__(self, logits: Tensor, row_index: Tensor, positions: Tensor, out: Tensor, *, filters: bool) -> None:
        """logits [n, V], left alone; row_index and positions [n] int32; out int32 [2, n]: token, bits of its score."""
        self._choose(
            logits, row_index, positions, self.seeds, self.temperature, self.top_k, self.top_p, filters=filters,
            out=out[0], scores=out[1].view(torch.float32), tokens=self._tokens,
        )  # fmt: skip
