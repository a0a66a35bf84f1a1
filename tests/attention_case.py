"""One step of paged attention with random contents: rows over scrambled blocks, run by a backend or by the reference.

Memory that was never written, and blocks that no query may read, are NaN; freed blocks are -1 in the table. Used by the
tests of a backend on its device and by those that interpret its kernels on CPU.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch

from quire.layers.batch import GroupStep
from quire.ops.attention import alibi_slopes, paged_attention
from quire.schema.kv import KVGroup, KVKind, KVSpec

RULES: list[dict[str, Any]] = [
    {}, {"window": 40}, {"chunk": 48}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True},
    {"learned": True}, {"window": 9, "softcap": 2.0, "sinks": True},
]  # fmt: skip
RULE_NAMES = ["-".join(rule) or "plain" for rule in RULES]


class Case:
    def __init__(
        self, lens, *, heads, kv_heads, size, value=0, block_size=16, rule=None, dtype=torch.float32, device="cpu",
        seed=0, shared=(),
    ):  # fmt: skip
        """lens: (context, queries) per row. value 0: as size; negative: latent, values are the first -value of keys.
        shared: (tokens, rows): these rows begin with the same blocks, and so with the same keys and values."""
        self.lens, self.heads, self.kv_heads, self.size, self.page = lens, heads, kv_heads, size, block_size
        self.latent, self.value = value < 0, abs(value) or size
        self.rule, self.dtype, self.device = dict(rule or {}), dtype, device
        self.contexts, self.counts = [c for c, _ in lens], [n for _, n in lens]
        rng = random.Random(seed)
        needed = [-(-c // block_size) for c in self.contexts]
        self.num_blocks = sum(needed) + 3
        free = list(range(self.num_blocks))
        rng.shuffle(free)
        self.tables = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        make = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=make).to(dtype)

        tokens = sum(self.contexts)
        self.k = draw(tokens, kv_heads, size)
        self.v = None if self.latent else draw(tokens, kv_heads, self.value)
        self.q = draw(sum(self.counts), heads, size)
        if shared:
            self._share(*shared)
        self.scale = size**-0.5
        self.sinks = torch.randn(heads, generator=make).to(dtype) if self.rule.get("sinks") else None
        self.alibi = alibi_slopes(heads) if self.rule.get("alibi") else None
        if self.rule.get("learned"):  # scores of 24 distances
            self.alibi = torch.randn((heads, 24), generator=make)

    def _share(self, tokens, rows):
        starts = [sum(self.contexts[:row]) for row in rows]
        for row, start in zip(rows[1:], starts[1:], strict=True):
            self.tables[row, : tokens // self.page] = self.tables[rows[0], : tokens // self.page]
            for tensor in (self.k, self.v):
                if tensor is not None:
                    tensor[start : start + tokens] = tensor[starts[0] : starts[0] + tokens].clone()

    @property
    def window(self):
        return self.rule.get("window", 0)

    @property
    def chunk(self):
        return self.rule.get("chunk", 0)

    def slots(self, row, start, end):
        p = torch.arange(start, end)
        return self.tables[row].long()[p // self.page] * self.page + p % self.page

    def _of_step(self, tensor):
        """The tokens this step computes: the last `count` of every row."""
        starts = [sum(self.contexts[:row]) for row in range(len(self.lens))]
        spans = [(s + c - n, s + c) for s, (c, n) in zip(starts, self.lens, strict=True)]
        return torch.cat([tensor[a:b] for a, b in spans]).to(self.device)

    def stored(self):
        """Keys and values of all tokens, as a cache holds them."""
        return self.k, self.v

    def reference(self):
        """In float32, whatever the case's dtype."""
        width = self.kv_heads * (self.size + (0 if self.latent else self.value))
        cache = torch.full((self.num_blocks * self.page, width), float("nan"))
        k, v = self.stored()
        for row, context in enumerate(self.contexts):
            part = slice(sum(self.contexts[:row]), sum(self.contexts[:row]) + context)
            pieces = [k[part].flatten(1)] + ([] if v is None else [v[part].flatten(1)])
            cache[self.slots(row, 0, context)] = torch.cat(pieces, 1).float()
        return paged_attention(
            self.q.float(), cache, self.tables, self.counts, self.contexts, block_size=self.page,
            kv_heads=self.kv_heads, scale=self.scale, v_size=self.value if self.latent else 0, window=self.window,
            chunk=self.chunk, softcap=self.rule.get("softcap", 0.0), alibi=self.alibi,
            sinks=None if self.sinks is None else self.sinks.float(),
        )  # fmt: skip

    def spec(self):
        kind = KVKind.WINDOW if self.window else KVKind.CHUNK if self.chunk else KVKind.FULL
        return KVSpec(
            layer="x", kind=kind, block_size=self.page, num_kv_heads=self.kv_heads, head_size=self.size,
            v_head_size=0 if self.latent else self.value, dtype=str(self.dtype).removeprefix("torch."),
            window=self.window or self.chunk,
        )  # fmt: skip

    def cache(self, backend, spare=0):
        """What earlier steps wrote; NaN elsewhere."""
        spec = self.spec()
        memory = torch.full((self.num_blocks, spec.page_bytes + spare), 0xFF, dtype=torch.uint8, device=self.device)
        cache = backend.make_cache(spec, self.num_blocks, memory)
        for row, (context, count) in enumerate(self.lens):
            slots = self.slots(row, 0, context - count).to(self.device)
            start = sum(self.contexts[:row])
            part = slice(start, start + context - count)
            for pages, written in ((cache.keys, self.k), (cache.values, self.v)):
                if pages is not None:
                    pages[slots // self.page, slots % self.page] = written[part].to(self.device)
        return cache

    def step(self, *, static=0, mirror=False):
        """mirror: rows lie in a larger table, found by row_index. static: a captured decode of so many entries."""
        tables = self.tables[: len(self.lens)].clone()
        for row, (context, count) in enumerate(self.lens):
            first = context - count  # the earliest query; blocks that not even it reads were freed
            gone = max(0, first - self.window + 1) if self.window else 0
            if self.chunk:
                gone = first // self.chunk * self.chunk
            tables[row, : gone // self.page] = -1
        slots = torch.cat([self.slots(row, c - n, c) for row, (c, n) in enumerate(self.lens)])
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        contexts, counts, index, wanted = list(self.contexts), list(self.counts), None, None
        if static or mirror:
            rows = torch.randperm(len(self.lens) + 2, generator=torch.Generator().manual_seed(5))[: len(self.lens)]
            larger = torch.full((len(self.lens) + 3, tables.shape[1] + 1), 1 << 30, dtype=torch.int32)
            larger[-1] = -1
            larger[rows, :-1] = torch.where(tables < 0, 1 << 30 if not (self.window or self.chunk) else -1, tables)
            tables, index, wanted = larger, rows, torch.tensor(contexts)
        if static:
            pad = static - len(self.lens)
            index = torch.cat((index, torch.full((pad,), len(larger) - 1)))
            wanted = torch.cat((wanted, torch.zeros(pad, dtype=torch.long)))
            slots = torch.cat((slots, torch.full((pad,), -1)))
            starts = torch.arange(static + 1)
            contexts, counts = [max(contexts)] * static, [1] * static
        to = self.device
        return GroupStep(
            tables.to(to), starts.int().to(to), contexts, counts, slots.to(to),
            row_index=None if index is None else index.int().to(to),
            contexts=None if wanted is None else wanted.int().to(to), is_decode=all(n == 1 for n in counts),
            is_static=bool(static),
        )  # fmt: skip

    def group(self):
        spec = self.spec()
        return KVGroup(kind=spec.kind, block_size=self.page, window=spec.window, layers=("x",))

    def inputs(self, pad=0):
        """q, k, v of the step, as slices of one fused tensor where they have one size; padding is finite."""
        k = self._of_step(self.k)
        v = None if self.v is None else self._of_step(self.v)
        q = self.q.to(self.device)
        extra = (0, 0, 0, 0, 0, pad)
        q, k = torch.nn.functional.pad(q, extra, value=0.5), torch.nn.functional.pad(k, extra, value=0.5)
        if v is None:
            return q, k, None
        v = torch.nn.functional.pad(v, extra, value=0.5)
        if self.value != self.size:
            return q, k, v
        fused = torch.cat((q, k, v), 1)
        return fused[:, : self.heads], fused[:, self.heads : -self.kv_heads], fused[:, -self.kv_heads :]

    def options(self):
        to = self.device
        return dict(
            scale=self.scale, v_size=self.value if self.latent else 0, softcap=self.rule.get("softcap", 0.0),
            sinks=None if self.sinks is None else self.sinks.to(to),
            alibi=None if self.alibi is None else self.alibi.to(to),
        )  # fmt: skip

    def run(self, backend, *, static=0, mirror=False, spare=0):
        """(result, cache): one step, eager or as a captured decode would run it."""
        cache = self.cache(backend, spare)
        plan = backend.plan(self.step(static=static, mirror=mirror), self.group())
        pad = static - len(self.lens) if static else 0
        return plan.run(*self.inputs(pad), cache, **self.options()), cache

    def run_refilled(self, backend, bucket):
        """(result, cache): as a captured step of any mix runs, whose lists are written before it."""
        eager, cache = self.step(mirror=True), self.cache(backend)
        inputs = self.inputs(bucket - sum(self.counts))
        slots = torch.nn.functional.pad(eager.slots, (0, bucket - sum(self.counts)), value=-1)
        plan = backend.plan(
            GroupStep(eager.block_tables, eager.query_starts, (), (), slots, is_static=True), self.group()
        )
        plan.run(*inputs, cache, **self.options())  # makes the room
        host = eager._replace(host_rows=eager.row_index.cpu().numpy(), host_tables=eager.block_tables.cpu().numpy())
        assert plan.refill(host)
        return plan.run(*inputs, cache, **self.options()), cache


class CodedCase(Case):
    """Over a cache in 8 bits. form: float8_e4m3fn | float8_e5m2, with scales (keys, values) | int8, with a scale for
    each token and head. The reference is float32 arithmetic over keys and values that were rounded here."""

    TOPS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

    def __init__(self, *args, form, scales=(1.0, 1.0), **named):
        super().__init__(*args, **named)
        self.form, self.scales = form, scales

    def _rounded(self, x, scale):
        if self.form == "int8":
            unit = x.float().abs().amax(-1, keepdim=True) / 127
            return (x.float() / unit).round() * unit
        top = self.TOPS[self.form]
        return (x.float() / scale).clamp(-top, top).to(getattr(torch, self.form)).float() * scale

    def stored(self):
        k_scale, v_scale = self.scales
        return self._rounded(self.k, k_scale), None if self.v is None else self._rounded(self.v, v_scale)

    def spec(self):
        return msgspec.structs.replace(super().spec(), dtype=self.form)

    def cache(self, backend, spare=0):
        """What earlier steps wrote, through the cache's own way; 0xFF elsewhere, which is NaN in float8 and float32."""
        spec = self.spec()
        memory = torch.full((self.num_blocks, spec.page_bytes + spare), 0xFF, dtype=torch.uint8, device=self.device)
        cache = backend.make_cache(spec, self.num_blocks, memory)
        if self.form != "int8":
            cache.layer_scales.copy_(torch.tensor(self.scales))
        for row, (context, count) in enumerate(self.lens):
            slots = self.slots(row, 0, context - count).to(self.device)
            start = sum(self.contexts[:row])
            part = slice(start, start + context - count)
            v = None if self.v is None else self.v[part].to(self.device)
            cache.write(slots, self.k[part].to(self.device), v)
        return cache
