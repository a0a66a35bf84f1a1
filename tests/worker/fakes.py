"""A model and an attention backend small enough to see through: the next logits are a function of the whole history as
read back through the paged cache, so a wrong block, slot, position or token shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.layers.batch import Batch, GroupStep
from quire.sampling.sampler import Sampler
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec
from quire.worker.device_inputs import DeviceInputs, GraphFields
from quire.worker.kv_memory import KVMemory
from quire.worker.rows import Rows
from quire.worker.runner import ModelRunner

STATES = 997  # distinct logits rows
BY_ADAPTER = 101  # what an adapter adds to the state


class FakeCache:
    def __init__(self, spec: KVSpec, memory: Tensor) -> None:
        self.spec = spec
        self.memory = memory
        whole = memory[:, : spec.page_bytes].view(torch.float32)
        self.cells = whole.view(memory.shape[0], spec.block_size, 2)  # token, position


class FakePlan:
    """'Attends' by reading every cached token it may see, and insists that each lies where it should."""

    def __init__(self, step: GroupStep, group: KVGroup) -> None:
        self.step, self.group = step, group

    def run(self, tokens: Tensor, positions: Tensor, cache: FakeCache) -> Tensor:
        size = self.group.block_size
        blocks, offsets = self.step.slots // size, self.step.slots % size
        cache.cells[blocks, offsets] = torch.stack((tokens.float(), positions.float()), 1)
        starts = self.step.query_starts.tolist()
        out = []
        if self.step.contexts is not None:
            assert self.step.contexts.tolist() == list(self.step.context_lens)
        for row, (context, query) in enumerate(zip(self.step.context_lens, self.step.query_lens, strict=True)):
            assert starts[row + 1] - starts[row] == query
            for place in range(context - query, context):
                first = max(0, place + 1 - self.group.window) if self.group.kind is KVKind.WINDOW else 0
                where = torch.arange(first, place + 1)
                line = row if self.step.row_index is None else int(self.step.row_index[row])
                own = self.step.block_tables[line, where // size]
                assert (own >= 0).all(), "a block that is needed is absent"
                seen = cache.cells[own.long(), where % size]
                assert seen[:, 1].tolist() == where.tolist(), "a block holds another position"
                out.append(digest(seen[:, 0].long().tolist(), first))
        return torch.tensor(out)


def digest(tokens: list[int], first: int) -> int:
    total = 0
    for place, token in enumerate(tokens, first):
        total = (total * 31 + (token + 1) * (place % 13 + 1)) % STATES
    return total


class FakeBackend:
    name = "FAKE"

    def supports(self, spec: KVSpec) -> str | None:
        return None

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> FakeCache:
        assert memory.shape[0] == num_blocks
        return FakeCache(spec, memory)

    def plan(self, step: GroupStep, group: KVGroup) -> FakePlan:
        return FakePlan(step, group)


class FakeModel:
    """Two layers in two KV groups: one sees everything, one the last `window` tokens."""

    window = 5
    captures = True

    def __init__(self, vocab: int = 40, *, seed: int = 0, scale: float = 2.0) -> None:
        self.arch = SimpleNamespace(vocab=vocab)
        self.logit_table = torch.randn(STATES, vocab, generator=torch.Generator().manual_seed(seed)) * scale
        self.weight = torch.nn.Parameter(torch.ones(3, 4))
        self.caches: dict[str, FakeCache] = {}
        self.groups: dict[str, int] = {}
        self.broken_states: set[int] = set()  # states whose logits are NaN
        self.num_tokens = 0

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        common: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
        return [
            KVSpec(layer="full", kind=KVKind.FULL, **common),
            KVSpec(layer="window", kind=KVKind.WINDOW, window=self.window, **common),
        ]

    def bind_kv(self, caches: dict[str, FakeCache], groups: dict[str, int]) -> None:
        self.caches, self.groups = dict(caches), dict(groups)

    def named_parameters(self):
        return [("weight", self.weight), ("tied", self.weight)]

    def forward(self, batch: Batch) -> Tensor:
        assert batch.token_ids.dtype == batch.positions.dtype == torch.int64
        assert batch.num_tokens == len(batch.token_ids) == len(batch.positions)
        self.num_tokens += batch.num_tokens
        token_ids = batch.token_ids
        if batch.input_vectors is not None:  # a vector says which token it stands for
            token_ids = token_ids.index_copy(0, batch.input_vectors.places, batch.input_vectors.vectors[:, 0].long())
        full, window = (
            batch.plans[self.groups[layer]].run(token_ids, batch.positions, self.caches[layer])
            for layer in ("full", "window")
        )
        if batch.adapter_index is not None:
            assert batch.adapter_index.dtype == torch.int32 and batch.adapter_index.shape == batch.positions.shape
            full = full + BY_ADAPTER * batch.adapter_index
        if batch.position_channels is not None:
            assert batch.position_channels.dtype == torch.int64
            full = full + by_channels(batch.position_channels, batch.positions)
        return torch.stack((full % STATES, window), 1).float()

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        states = state_of(hidden[:, 0].long(), hidden[:, 1].long())
        logits = self.logit_table[states].clone()
        for row, state in enumerate(states.tolist()):
            if state in self.broken_states:
                logits[row] = float("nan")
        return logits

    def narrow_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        return self.logits(hidden)

    def logits_after(self, tokens: list[int], added: int = 0) -> list[float]:
        """The oracle: the same without a cache. `added`: by adapters and channels, to what is seen of everything."""
        first = max(0, len(tokens) - self.window)
        full = (digest(tokens, 0) + added) % STATES
        return self.logit_table[int(state_of(torch.tensor(full), torch.tensor(digest(tokens[first:], first))))].tolist()

    def state_after(self, tokens: list[int], first: int | None = None) -> int:
        first = max(0, len(tokens) - self.window) if first is None else first
        return int(state_of(torch.tensor(digest(tokens, 0)), torch.tensor(digest(tokens[first:], first))))


def by_channels(channels: Tensor, positions: Tensor) -> Tensor:
    """0 where every channel is the position."""
    return ((channels - positions) * torch.arange(1, len(channels) + 1)[:, None]).sum(0) * 5


def state_of(full: Tensor, window: Tensor) -> Tensor:
    return (full * 7 + window * 3) % STATES


def make_layout(specs: list[KVSpec], num_blocks: int) -> KVLayout:
    """One group per layer, all in one memory slot."""
    groups = tuple(
        KVGroup(kind=spec.kind, block_size=spec.block_size, window=spec.window, layers=(spec.layer,)) for spec in specs
    )
    return KVLayout(
        num_blocks=num_blocks,
        page_bytes=max(spec.page_bytes for spec in specs) + 64,
        groups=groups,
        slots=(tuple(spec.layer for spec in specs),),
        specs=tuple(specs),
    )


def make_config(**changes: Any) -> Any:
    """As much of an EngineConfig as a worker reads."""
    given = {
        "max_model_len": 64, "max_num_seqs": 8, "block_size": 4, "logprobs_mode": "raw_logprobs",
        "logits_processors": (), "kv_cache_memory_bytes": None,
    } | changes  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_pooling=False,
            takes_media=False,
            max_model_len=given["max_model_len"],
            logprobs_mode=given["logprobs_mode"],
            logits_processors=given["logits_processors"],
            dtype="float32",
            facts=SimpleNamespace(max_positions=128),
        ),
        cache_config=SimpleNamespace(
            block_size=given["block_size"],
            cache_dtype="auto",
            calculate_kv_scales=False,
            kv_cache_memory_bytes=given["kv_cache_memory_bytes"],
            enable_prefix_caching=True,
            mamba_block_size=None,
            gpu_memory_utilization=0.9,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=given["max_num_seqs"], max_num_batched_tokens=64, encoder_cache_size=64
        ),
        attention_config=SimpleNamespace(backend=None),
        load_config=SimpleNamespace(load_format="safetensors"),
        parallel_config=SimpleNamespace(worker_extension_cls="", place_here=0, num_engines_here=1, nnodes=1),
        device_config=SimpleNamespace(device="cpu"),
        speculative_config=None,
    )


def make_runner(
    model: FakeModel | None = None, *, num_blocks: int = 64, staged: bool = False, fields: GraphFields = GraphFields(),
    **changes: Any,
) -> ModelRunner:  # fmt: skip
    """staged: inputs as for a device of its own, though on CPU."""
    model = model or FakeModel()
    config = make_config(block_size=4, **changes)
    layout = make_layout(model.kv_specs(4, "float32"), num_blocks)
    backend = FakeBackend()
    kv = KVMemory(layout, torch.device("cpu"))
    kv.bind(backend, model)
    rows = Rows(
        layout.groups, config.scheduler_config.max_num_seqs, config.model_config.max_model_len, torch.device("cpu")
    )
    inputs = DeviceInputs(rows, 256, fields) if staged else None
    return ModelRunner(model, rows, Sampler(config, model.arch.vocab, rows.tokens), backend, kv=kv, inputs=inputs)
