"""Trial steps: what real ones compute, without requests, over a KV cache of a single block that every position shares.

They tell how much memory a step takes beside the weights, and which kernels a model will want, before there is a KV
cache or even a weight. In: a runner bound to such a cache (`scratch_layout`). Must not know: budgets, compilers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.ops.sample import allow_words_
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec
from quire.worker.inputs import StepShape
from quire.worker.runner import ModelRunner, logits_at_once

if TYPE_CHECKING:
    from quire.worker.media import EncodesItems
    from quire.worker.pooling_runner import PoolingRunner

# Beside the largest step: some kernels go by the number of tokens, with tiles of 96 and 192 among them.
TOKENS = tuple(sorted({*(1 << i for i in range(1, 13)), 96, 192}))
# Rows that the output matrix multiplies, which goes by them: requests, all drafts of them, or tokens of a prompt.
OUTPUTS = (1, 2, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024)
DECODES = (4, 24, 96)  # rows that decode in a step: attention goes by it
ALONE = 1024  # tokens of a prompt that has a step for itself
PROMPT = 64  # of one with an adapter
CONTEXT = 600  # tokens before them: enough to look for a prefix that they share


def scratch_layout(specs: Sequence[KVSpec], num_blocks: int = 1) -> KVLayout:
    """No layers share memory: each has a slot of its own, so one block number serves a text in all groups."""
    members: dict[tuple[KVKind, int, int], list[str]] = {}
    for spec in specs:
        members.setdefault((spec.kind, spec.block_size, spec.window), []).append(spec.layer)
    groups = tuple(
        KVGroup(kind=kind, block_size=size, window=window, layers=tuple(layers))
        for (kind, size, window), layers in members.items()
    )
    return KVLayout(
        num_blocks=num_blocks,
        page_bytes=max((spec.page_bytes for spec in specs), default=0),
        groups=groups,
        slots=tuple((spec.layer,) for spec in specs),
        specs=tuple(specs),
    )


@torch.inference_mode()
def allow_nothing(vocab_size: int, device: torch.device) -> None:
    """What a grammar's mask launches, for one row. The rest of the sampling pipeline has no kernels of ours."""
    words = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    allow_words_.on(device)(torch.zeros((1, vocab_size), dtype=torch.float32, device=device), row, words)


class Trial:
    def __init__(self, runner: ModelRunner | PoolingRunner, max_len: int, *, context_ranks: int = 1) -> None:
        """`context_ranks`: that divide every context, so that each has a part of what rows may share."""
        assert runner.inputs is not None
        self._runner, self._inputs, self._max_len = runner, runner.inputs, max_len
        self._context = CONTEXT * context_ranks
        self._state: torch.Tensor | None = None  # hidden, of one token of the last step
        self._pretend(agree=True)
        self._inputs.mirror.flat.zero_()

    def step(self, num_tokens: int, num_rows: int, *, filters: bool = True, all_states: bool = False) -> None:
        """Prompts of `num_tokens` tokens together, in `num_rows` rows that all sample; the first row is the longest.
        `all_states`: as with a row that wants those of tokens that are not sampled."""
        num_rows = min(num_rows, num_tokens, self._runner.rows.max_rows)
        counts = np.full(num_rows, min(num_tokens // num_rows, self._max_len), np.int64)
        for row in range(num_rows):
            counts[row] += min(num_tokens - int(counts.sum()), self._max_len - counts[row])
        if self._runner.rows.has_cross:
            with torch.inference_mode():
                self._encoder().encode_nothing(num_tokens)
        self._run(np.zeros_like(counts), counts, filters, all_states=all_states)

    def mixed(self, chunk: int, num_decodes: int, context: int) -> None:
        """A chunk of a prompt under way (0: none) beside rows that decode, each after `context` tokens."""
        num_decodes = min(num_decodes, self._runner.rows.max_rows - 1)
        chunk = min(chunk, self._max_len)
        counts = np.array([*([chunk] if chunk else []), *[1] * num_decodes], np.int64)
        starts = np.minimum(np.full(len(counts), context), self._max_len - counts)
        self._run(starts, counts, filters=False)

    def decode(self, bucket: int) -> None:
        """What a graph of this bucket holds."""
        assert self._runner.graphs is not None
        with torch.inference_mode():
            self._runner.graphs.run_uncaptured(bucket)

    @torch.inference_mode()
    def outputs(self) -> None:
        """The output matrix alone, after a step: no step has as many rows that sample as drafts or prompts may make."""
        runner, state = self._runner, self._state
        if state is None or not isinstance(runner, ModelRunner):
            return
        most = min(OUTPUTS[-1], max(256, runner.rows.max_rows, logits_at_once(runner.sampler.rows.vocab_size)))
        for count in (*(count for count in OUTPUTS if count < most), most):
            runner.model.narrow_logits(state.expand(count, *state.shape[1:]).contiguous())

    def with_adapters(self, largest: int) -> None:
        """What graphs with adapters hold, and a prompt with one, where adapters change every layer."""
        runner = self._runner
        if not isinstance(runner, ModelRunner) or runner.adapter_graphs is None or runner.adapters is None:
            return
        sizes = runner.adapter_graphs.sizes
        runner.adapters.step.every_layer = True
        try:
            with torch.inference_mode():
                for bucket in (size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]):
                    runner.adapter_graphs.run_uncaptured(bucket)
            count = np.array([min(PROMPT, largest, self._max_len)], np.int64)
            self._run(np.zeros_like(count), count, filters=False, adapters=np.ones(1, np.int32))
        finally:
            runner.adapters.step.every_layer = False

    @property
    def mixed_sizes(self) -> Sequence[int]:
        """Buckets of graphs for steps with prompts."""
        return () if self._runner.mixed is None else self._runner.mixed.sizes

    def mixed_graph(self, bucket: int) -> None:
        """What a graph of a step with prompts holds."""
        assert self._runner.mixed is not None
        self._runner.mixed.run_uncaptured(bucket)

    def all(self, largest: int, buckets: Sequence[int]) -> None:
        """One of each kind that may take kernels of its own."""
        if isinstance(self._runner, ModelRunner):
            allow_nothing(self._runner.sampler.rows.vocab_size, self._inputs.device)
        for count in (1, *(count for count in TOKENS if count < largest), largest):
            self.step(count, max(1, count // 16))
        self.outputs()
        self.step(min(ALONE, largest), 1)
        for agree in (True, False):  # rows that begin with the same blocks may be served together
            self._pretend(agree)
            for num_decodes in (d for d in DECODES if d < largest):
                for chunk in (0, min(256, largest - num_decodes)):
                    self.mixed(chunk, num_decodes, self._context)
        for bucket in buckets:
            if bucket & (bucket - 1) == 0 or bucket == buckets[-1]:
                self.decode(bucket)
        self.with_adapters(largest)
        for bucket in reversed(self.mixed_sizes):  # the largest first: it makes the room of all
            if bucket & (bucket - 1) == 0 or bucket == self.mixed_sizes[-1]:
                self.mixed_graph(bucket)

    @torch.inference_mode()
    def _run(
        self, starts: np.ndarray, counts: np.ndarray, filters: bool, *, adapters: np.ndarray | None = None,
        all_states: bool = False,
    ) -> None:  # fmt: skip
        rows = np.arange(len(counts))
        shape = StepShape(
            rows, starts, counts, np.cumsum(counts), np.ones(len(counts), np.bool_), rows, adapters=adapters
        )
        runner = self._runner
        if runner.rows.has_cross:
            shape = self._with_encoders(shape)
        step = self._inputs.build(shape, runner.backend)
        if not isinstance(runner, ModelRunner):  # what follows is small beside it
            runner.model.forward(step.batch)
            return
        batch = step.batch if runner.pipe is None else runner.pipe.blank(step.batch)
        batch = batch if all_states else runner.narrowed(batch)
        hidden = runner.model.forward(batch)
        if not runner.samples:
            return
        if len(batch.logit_index) < len(hidden):
            hidden = hidden.index_select(0, batch.logit_index)
        self._state = hidden[:1]
        logits = runner.model.narrow_logits(hidden)
        runner.sampler.plain.refresh()
        out = torch.empty((2, len(rows)), dtype=torch.int32, device=logits.device)
        runner.sampler.plain(logits, step.sampled.rows, step.sampled.positions, out, filters=filters)

    def _with_encoders(self, shape: StepShape) -> StepShape:
        """In a step of prompts, as many tokens come from encoders as decoders have: at least one for each row."""
        device = self._inputs.device
        lens = np.minimum(shape.counts, self._longest_encoded())
        begins = shape.starts == 0
        encoded = None
        if begins.any():
            dtype = next(weight.dtype for _, weight in self._runner.model.named_parameters())
            encoded = torch.zeros((int(lens[begins].sum()), self._encoder().width), dtype=dtype, device=device)
        return replace(shape, encoder_lens=lens, begins=begins, encoded=encoded)

    def _encoder(self) -> EncodesItems:
        from quire.worker.media import EncodesItems  # lazy

        model = self._runner.model
        assert isinstance(model, EncodesItems)
        return model

    def _longest_encoded(self) -> int:
        cross = [table for table in self._runner.rows.tables if table.group.kind is KVKind.CROSS]
        return min(table.host.shape[1] * table.group.block_size for table in cross)

    def _pretend(self, agree: bool) -> None:
        """As far as the host knows, all rows have the same blocks, or each its own. On the device there is only one."""
        for table in self._runner.rows.tables:
            agreed = agree or table.group.kind is KVKind.CROSS  # whose slots are the host's
            table.host[:] = 0 if agreed else np.arange(len(table.host), dtype=np.int32)[:, None]
