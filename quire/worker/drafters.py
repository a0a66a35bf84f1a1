"""Drafters that are models: loaded beside the model they draft for, with their own share of its KV memory.

In: the resolved configuration, and how the worker makes models. Out: a Drafter, which becomes a Proposer once the KV
layout is known. Must not know: how a proposer works, budgets of a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.base import env
from quire.base.log import logger
from quire.config.engine import replace
from quire.config.kernels import CUDAGraphMode
from quire.drafting.proposer import Proposer
from quire.loader.drafters import HeadDrafter, make_head
from quire.models.decoder import Decoder, Tap
from quire.models.draft_heads import MedusaHeads, MlpSpeculator
from quire.models.draft_layers import FeatureDrafter
from quire.ops.op import Kernels
from quire.quant.shard import ALONE, ShardGroup
from quire.sampling.sampler import Sampler
from quire.schema.kv import KVLayout, KVSpec
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs
from quire.worker.draft_choice import DraftChoice, DrawnChoice
from quire.worker.draft_features import FeatureProposer
from quire.worker.draft_heads import HeadProposer
from quire.worker.draft_memory import DraftMemory
from quire.worker.draft_model import DraftModel
from quire.worker.graphs import DecodeGraphs, useful_sizes
from quire.worker.kv_memory import BindsKV
from quire.worker.kv_scales import kv_dtype_of
from quire.worker.mixed_graphs import MixedGraphs, mixed_sizes
from quire.worker.runner import ModelRunner

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.build import Model
    from quire.worker.worker import WorkerParts

_MOST_CAPTURED = 512  # tokens of a pass; longer ones keep the device busy for longer than launching them takes
_log = logger(__name__)


class Drafter:
    """A loaded drafter: a draft model, or a head that reads the hidden states of the model."""

    def __init__(
        self,
        model: Model | HeadDrafter,
        config: EngineConfig,
        parts: WorkerParts,
        target: Model,
        device: torch.device,
        *,
        drawn_vocab: int = 0,
        captured: bool = True,
        unknown_token: int | None = None,
    ) -> None:
        """`config`: the drafter's own; of method mtp that of the model. `target`: the model that is drafted for.
        `drawn_vocab`: its tokens, if drafts are drawn from distributions over them; 0: they are the best. `captured`:
        a draft model's passes may be graphs. `unknown_token`: it drafts all tokens in one pass, and this stands for
        those to come."""
        self._captured, self._unknown_token = captured, unknown_token
        self.model, self._config, self._parts, self._device = model, config, parts, device
        self._drawn_vocab, self._taps = drawn_vocab, self._tap(target)
        self.specs: tuple[KVSpec, ...] = ()
        if not isinstance(model, MedusaHeads | MlpSpeculator):
            self.specs = tuple(model.kv_specs(config.cache_config.block_size, kv_dtype_of(config)))

    def reload(self) -> None:
        """Read its weights again, in place. What it computed for rows with the old ones stays: drafts are verified."""
        self._parts.reload_weights(self.model, self._config)

    def leave(self, num_bytes: int, specs: Sequence[KVSpec]) -> int:
        """What is left of a budget for the KV of the model: both get memory for the same number of tokens."""
        ours, theirs = _token_bytes(self.specs), _token_bytes(specs)
        return int(num_bytes * theirs / max(1, ours + theirs))

    def other_bytes(self) -> int:
        """What it will take beside weights and KV: the rows' tokens and tables, and states that were not read yet."""
        scheduler, length = self._config.scheduler_config, self._config.model_config.max_model_len
        rows = 8 * (scheduler.max_num_seqs + 1) * (length + 1) if self.specs else 0
        if not isinstance(self.model, FeatureDrafter):
            return rows
        return rows + 2 * self._most_tokens * self.model.state_width * self.model.storage.dtype.itemsize

    def proposer(self, layout: KVLayout, max_model_len: int) -> Proposer:
        """`layout`: of the model that is drafted for, whose KV memory ours is measured by."""
        if isinstance(self.model, MedusaHeads | MlpSpeculator):
            return HeadProposer(self.model, self._choice())
        memory = self._memory(self.model, layout, max_model_len)
        if isinstance(self.model, FeatureDrafter):
            return FeatureProposer(self.model, memory, self._most_tokens, self._choice())
        runner = None
        if memory.inputs is not None and self._unknown_token is None:
            runner = self._runner(self.model, memory, memory.inputs)
        return DraftModel(self.model, memory, self._most_tokens, self._choice(), runner, self._unknown_token)

    @property
    def _most_tokens(self) -> int:
        """Of a step."""
        scheduler = self._config.scheduler_config
        return max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    def _sizes(self) -> tuple[int, ...]:
        """Buckets of decode graphs, of the drafter and of the model that it drafts for, where these are captured."""
        compilation = self._config.compilation_config
        if CUDAGraphMode[compilation.cudagraph_mode or "NONE"].decode_mode() is not CUDAGraphMode.FULL:
            return ()
        return useful_sizes(compilation.cudagraph_capture_sizes or (), self._config.scheduler_config.max_num_seqs)

    def _choice(self) -> DraftChoice:
        return DrawnChoice(self._drawn_vocab) if self._drawn_vocab else DraftChoice()

    def inner_states(self) -> Callable[[int], Tensor] | None:
        """What the drafter reads of the model's inside, of its latest step's first tokens; None: nothing."""
        taps = self._taps
        return (lambda count: torch.cat([tap.read(count) for tap in taps], -1)) if taps else None

    def _tap(self, target: Model) -> list[Tap]:
        """Before graphs of the model are captured: they leave what is read in memory of ours."""
        if not isinstance(self.model, FeatureDrafter) or not self.model.taps:
            return []
        assert isinstance(target, Decoder)  # others have no such drafter
        taps = target.tap(self.model.taps)
        if self._device.type != "cpu":
            storage, most = self.model.storage, max(self._most_tokens, *self._sizes(), 1)
            for tap in taps:
                tap.buffer = torch.zeros((most, target.arch.width), dtype=storage.dtype, device=self._device)
        return taps

    def _runner(self, model: Model, memory: DraftMemory, inputs: DeviceInputs) -> ModelRunner:
        """For a draft model: its steps of one token for each row are captured, as those of a model are, and so are
        those in which rows read a few tokens that they have not drafted."""
        rows, backend, capturer = memory.rows, memory.backend, Capturer(self._device)
        sampler = Sampler(self._config, model.arch.vocab, rows.tokens)
        runner = ModelRunner(model, rows, sampler, backend, kv=memory.kv, inputs=inputs)
        if model.captures and self._captured and (sizes := self._sizes()):
            if mixed := self._mixed_sizes(memory.kv.layout):
                runner.mixed = MixedGraphs(mixed, model, backend, inputs, capturer)
                runner.mixed.capture()
            runner.graphs = DecodeGraphs(
                sizes, model, backend, inputs, sampler.plain, capturer, max_context=memory.max_len
            )
            runner.graphs.capture()
        return runner

    def _mixed_sizes(self, layout: KVLayout) -> tuple[int, ...]:
        mode = CUDAGraphMode[self._config.compilation_config.cudagraph_mode or "NONE"]
        if mode.mixed_mode() is not CUDAGraphMode.FULL or env.BATCH_INVARIANT.get():
            return ()
        return mixed_sizes(layout.groups, min(self._most_tokens, _MOST_CAPTURED))

    def _memory(self, model: BindsKV, layout: KVLayout, max_model_len: int) -> DraftMemory:
        config, theirs = self._config, max(1.0, _token_bytes(layout.specs))
        block_bytes = sum(spec.page_bytes for spec in self.specs)
        max_len = min(config.model_config.max_model_len, max_model_len)
        max_rows = config.scheduler_config.max_num_seqs
        most = max_rows * -(-(max_len + 1) // config.cache_config.block_size)
        num_bytes = int(layout.total_bytes * _token_bytes(self.specs) / theirs)
        num_blocks = min(most, num_bytes // max(1, block_bytes))
        _log.info("Drafter: %d KV blocks, %.2f GiB", num_blocks, num_blocks * block_bytes / 2**30)
        backend = self._parts.select_backend(self._device.type, self.specs, config.attention_config.backend)
        return DraftMemory(
            model, self.specs, backend, num_blocks=num_blocks, max_rows=max_rows, max_len=max_len,
            max_tokens=max(self._most_tokens, *self._sizes(), 1), device=self._device,
        )  # fmt: skip


def _token_bytes(specs: Sequence[KVSpec]) -> float:
    """Of one token, on one rank; where ranks divide contexts among themselves, on average."""
    return sum(spec.token_bytes / spec.context_ranks for spec in specs)


def load_drafter(
    config: EngineConfig, kernels: Kernels, parts: WorkerParts, target: Model, group: ShardGroup = ALONE
) -> Drafter | None:
    """`target`: the model that is drafted for, which these ranks share. None: the method has no model."""
    speculative = config.speculative_config
    if speculative is None or not speculative.has_drafter:
        return None
    changes: dict[str, Any] = {"speculative_config": None, "lora_config": None}
    if speculative.drafter is not None:
        changes |= {
            "model_config": speculative.drafter.model_config,
            "load_config": speculative.drafter.load_config,
            "cache_config.cache_dtype": speculative.drafter.cache_dtype,
        }
        if speculative.drafter.attention_backend is not None:
            changes["attention_config.backend"] = speculative.drafter.attention_backend
    own = replace(config, **changes)
    if speculative.draft_tensor_parallel_size == 1:
        group = ALONE  # all ranks compute the same
    group = dataclasses.replace(group, context=None)  # whose KV is the drafter's own, and whole
    if speculative.method == "draft_model":
        model: Model | HeadDrafter = parts.make_model(own, kernels, group)
    else:
        model = make_head(speculative.method or "", own, target, kernels, group)
    parts.reload_weights(model, own)
    drawn_vocab = target.arch.vocab if speculative.draft_sample_method == "probabilistic" else 0
    captured = not speculative.enforce_eager
    unknown_token = None if speculative.drafter is None else speculative.drafter.unknown_token
    return Drafter(
        model, own, parts, target, kernels.device, drawn_vocab=drawn_vocab, captured=captured,
        unknown_token=unknown_token,
    )  # fmt: skip
