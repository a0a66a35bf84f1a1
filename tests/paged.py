"""Run a model of quire.models over paged KV memory without a worker: block tables and steps made by hand.

A Paged holds the model, one pool of blocks per KV group and its rows. `step([(row, count), ...])` computes the next
`count` tokens of each row in one batch and returns their logits, row by row. `slots` are the rows' adapters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from quire.attention.backend import AttentionBackend
from quire.attention.context_ranks import WithContextRanks, divide
from quire.attention.select import select_backend
from quire.layers.batch import Batch, GroupStep
from quire.models.build import Model
from quire.schema.kv import KVGroup, KVKind


class Paged:
    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], *, block_size: int, seed: int = 0,
        slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.slots = slots
        self.model, self.prompts, self.block_size = model, [list(p) for p in prompts], block_size
        self.done = [0] * len(prompts)
        rng = random.Random(seed)
        dtype = str(model.storage.dtype).removeprefix("torch.")
        specs, context = model.kv_specs(block_size, dtype), model.storage.group.context
        self.backend: AttentionBackend = select_backend("cpu", specs)
        if context is not None:
            specs = divide(specs, context)
            self.backend = WithContextRanks.over(self.backend, context, specs)
            block_size = self.block_size = block_size * context.size
        kinds = list(dict.fromkeys((spec.kind, spec.window) for spec in specs))
        self.groups = [
            KVGroup(kind=kind, block_size=block_size, window=window, layers=tuple(
                spec.layer for spec in specs if (spec.kind, spec.window) == (kind, window)))
            for kind, window in kinds
        ]  # fmt: skip
        per_row = [-(-len(p) // block_size) for p in prompts]
        self.num_blocks = sum(per_row) + 3
        page = max(spec.page_bytes for spec in specs)
        self.tables, caches, index = [], {}, {}
        for g, group in enumerate(self.groups):
            free = list(range(self.num_blocks))
            rng.shuffle(free)  # scrambled: a row's blocks lie anywhere
            self.tables.append([[free.pop() for _ in range(n)] for n in per_row])
            index |= dict.fromkeys(group.layers, g)
        for spec in specs:
            memory = torch.full((self.num_blocks, page), 0xFF, dtype=torch.uint8)  # NaN wherever nothing was written
            caches[spec.layer] = self.backend.make_cache(spec, self.num_blocks, memory)
        model.bind_kv(caches, index)

    def step(self, grants: Sequence[tuple[int, int]], shift: int = 0) -> list[torch.Tensor]:
        """`shift` is added to every position, for tests that want it wrong."""
        ids, positions, rows = [], [], []
        for row, count in grants:
            start = self.done[row]
            ids += self.prompts[row][start : start + count]
            positions += range(start, start + count)
            rows.append((row, start, count))
        plans = [self.backend.plan(self._group_step(g, rows), group) for g, group in enumerate(self.groups)]
        slots = self._slots_of(grants)
        batch = Batch(
            token_ids=torch.tensor(ids), positions=torch.tensor(positions) * (1 + shift), plans=plans,
            logit_index=torch.arange(len(ids)), num_tokens=len(ids), adapter_index=slots,
        )  # fmt: skip
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch), slots)
        for row, _, count in rows:
            self.done[row] += count
        return list(logits.split([count for _, count in grants]))

    def _slots_of(self, grants: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        if self.slots is None or not any(self.slots[row] for row, _ in grants):
            return None
        slots = [self.slots[row] for row, count in grants for _ in range(count)]
        return torch.tensor(slots, dtype=torch.int32)

    def _group_step(self, g: int, rows: list[tuple[int, int, int]]) -> GroupStep:
        size, group = self.block_size, self.groups[g]
        tables = torch.full((len(rows), max(map(len, self.tables[g]))), -1, dtype=torch.int32)
        slots: list[int] = []
        for i, (row, start, count) in enumerate(rows):
            blocks = list(self.tables[g][row])
            if group.kind is KVKind.WINDOW:  # blocks no query can read any more are gone
                blocks = [-1 if (b + 1) * size <= start - group.window + 1 else x for b, x in enumerate(blocks)]
            tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots += [blocks[p // size] * size + p % size for p in range(start, start + count)]
        counts = [count for _, _, count in rows]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return GroupStep(tables, starts, [start + count for _, start, count in rows], counts, torch.tensor(slots))

    def whole(self) -> list[torch.Tensor]:
        """Every prompt in one chunk, all rows in one step."""
        return self.step([(row, len(prompt)) for row, prompt in enumerate(self.prompts)])

    def in_chunks(self, seed: int) -> list[torch.Tensor]:
        """Random chunks of random rows until all are done; single tokens are as likely as longer pieces."""
        rng = random.Random(seed)
        found: list[list[torch.Tensor]] = [[] for _ in self.prompts]
        while any(d < len(p) for d, p in zip(self.done, self.prompts, strict=True)):
            grants = []
            for row in rng.sample(range(len(self.prompts)), len(self.prompts)):
                left = len(self.prompts[row]) - self.done[row]
                if left and rng.random() < 0.8:
                    grants.append((row, min(left, rng.choice([1, 1, 1, 2, 3, 7, 12]))))
            if grants:
                for (row, _), logits in zip(grants, self.step(grants), strict=True):
                    found[row].append(logits)
        return [torch.cat(pieces) for pieces in found]
