"""A case of paged attention (attention_case.py) as one of several ranks has it that divide every context."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.attention.context_exchange import own_slots
from quire.attention.context_ranks import divide, own_part
from tests.attention_case import Case, CodedCase


class Twins:
    """Ranks of which the other ones say what this one says, so that a single process can do what takes all of them."""

    by_exchange = False

    def __init__(self, rank: int, size: int = 2, interleave: int = 1) -> None:
        self.rank, self.size, self.interleave = rank, size, interleave

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def scatter(self, parts: Tensor) -> Tensor:
        return parts[self.rank] * self.size

    def exchange(self, parts: Tensor) -> Tensor:
        return parts


class DividedCase:
    """Blocks of the case are the scheduler's; heads of queries are shared out among the ranks in order."""

    def __init__(self, case: Case, ranks: Any) -> None:
        self.case, self.ranks = case, ranks
        share = case.heads // ranks.size
        self.mine = slice(ranks.rank * share, (ranks.rank + 1) * share)

    def step(self, **how: Any) -> Any:
        return self.case.step(**how)

    def group(self) -> Any:
        return self.case.group()

    def inputs(self, pad: int = 0) -> tuple[Any, ...]:
        q, k, v = self.case.inputs(pad)
        return q[:, self.mine], k, v

    def options(self) -> dict[str, Any]:
        options = self.case.options()
        return options | {
            name: None if options[name] is None else options[name][self.mine] for name in ("sinks", "alibi")
        }

    def room(self, backend: Any) -> Any:
        """A cache of NaN."""
        case, ranks = self.case, self.ranks
        whole = msgspec.structs.replace(case.spec(), block_size=case.page // ranks.size)
        spec = own_part(divide([whole], ranks)[0])
        memory = torch.full((case.num_blocks, spec.page_bytes), 0xFF, dtype=torch.uint8, device=case.device)
        return backend.make_cache(spec, case.num_blocks, memory)

    def cache(self, backend: Any) -> Any:
        """What this rank kept of earlier steps; NaN elsewhere."""
        case, ranks, cache = self.case, self.ranks, self.room(backend)
        if isinstance(case, CodedCase) and case.form != "int8":
            cache.layer_scales.copy_(torch.tensor(case.scales))
        for row, (context, count) in enumerate(case.lens):
            slots = own_slots(case.slots(row, 0, context - count), case.page, ranks)
            start = sum(case.contexts[:row])
            kept = (slots >= 0).nonzero().flatten()
            v = None if case.v is None else case.v[start + kept].to(case.device)
            cache.write(slots[kept].to(case.device), case.k[start + kept].to(case.device), v)
        return cache

    def run(self, backend: Any, *, static: int = 0) -> Any:
        return self.run_shared(backend, static=static)[0]

    def run_shared(self, backend: Any, *, static: int = 0) -> tuple[Any, list[Any]]:
        """One step, eager or as a captured decode would run it, and the prefixes that were looked for."""
        plan = backend.plan(self.step(static=static), self.group())
        pad = static - len(self.case.lens) if static else 0
        out = plan.run(*self.inputs(pad), self.cache(backend), **self.options())
        shared = [work.shared for made in plan._made.values() for work in made]
        return out, [one for one in shared if one is not None and one.programs]

    def run_refilled(self, backend: Any, bucket: int) -> Any:
        return Case.run_refilled(self, backend, bucket)[0]  # type: ignore[arg-type]

    @property
    def counts(self) -> list[int]:
        return self.case.counts
