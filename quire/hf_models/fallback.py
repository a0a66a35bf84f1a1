"""Fallback: a causal language model class of transformers (or with the same interface) as one of Quire's models.

The modules are transformers', unchanged. Attention goes through Quire's plans (taps.py) if modules look it up in
transformers' table of attention functions; else each row runs with transformers' cache, filled from Quire's blocks
(by_row.py). A rehearsal after the weights are loaded chooses between the two, records what every layer caches and
checks the logits (settle.py); a model that supports neither is refused with the reasons. Must not know: blocks,
backends, requests.

    class of transformers ──weights──▶ rehearsal ──▶ kv_specs ──bind_kv──▶ forward(batch) ─▶ hidden ─▶ logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.base.log import logger
from quire.hf_models.body_and_head import BodyAndHead
from quire.hf_models.by_row import ByRow, PagedRows, spans_of
from quire.hf_models.settle import inputs_of, settle
from quire.hf_models.taps import CallShape, Taps
from quire.layers.batch import AttentionPlan, Batch, LayerCache
from quire.schema.errors import CheckpointError, NotBuiltError
from quire.schema.kv import KVSpec

_log = logger(__name__)


@dataclass(frozen=True)
class ForeignArch:
    """What the engine needs to know about an architecture without a declaration."""

    vocab: int


class BoundSource:
    """The plans of a step and the caches of the layers, for taps."""

    def __init__(self, batch: Batch, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        self._batch, self._caches, self._groups = batch, caches, groups

    def plan_of(self, layer: str, shape: CallShape | None) -> tuple[AttentionPlan, LayerCache | None]:
        return self._batch.plans[self._groups[layer]], self._caches.get(layer)


class Fallback:
    """`make()` returns the module on its device, in its dtype, without weights; `read(folder, safetensors)` with."""

    captures = False  # its forward may wait for the device, so it is never captured in a graph

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        read: Callable[[str, bool], nn.Module],
        *,
        max_model_len: int,
    ) -> None:
        self.name = name
        self._make, self._read, self._longest = make, read, max_model_len
        self._model: nn.Module | None = None
        self._split: BodyAndHead | None = None
        self._runner: Taps | ByRow | None = None
        self._caches: dict[str, LayerCache] = {}
        self._groups: dict[str, int] = {}
        self._vocab = 0

    # --- weights

    @property
    def model(self) -> nn.Module:
        """The transformers module; created without weights if none were read yet."""
        if self._model is None:
            self._model = self._make()
        return self._model

    def read_folder(self, folder: str, safetensors: bool = True) -> None:
        """Load all weights from a checkpoint folder, with transformers' loader."""
        self._model = self._split = None  # freed before another copy is made
        self._model = self._read(folder, safetensors)
        self.finish_weights()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """By the names of transformers' state dict."""
        parameters = dict(self.model.state_dict(keep_vars=True))
        taken = set()
        for name, tensor in weights:
            if name not in parameters:
                raise CheckpointError(f"{self.name} has no parameter for tensor {name!r}", param=name)
            if parameters[name].shape != tensor.shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(tensor.shape)}; {self.name} expects "
                    f"{list(parameters[name].shape)}"
                )
            parameters[name].data.copy_(tensor)
            taken.add(name)
        if self._runner is None:
            self.finish_weights()
        return taken

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and buffers that are part of a checkpoint."""
        yield from self.model.state_dict(keep_vars=True).items()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    # --- what every layer caches

    @torch.inference_mode()
    def finish_weights(self) -> None:
        """The rehearsal: determines how the model runs, or refuses it."""
        self._split = self._runner = None
        model = self.model.eval().requires_grad_(False)
        fix_ropes(model, self._longest)
        self._split, self._runner, self._vocab = settle(model, self.name)

    @property
    def arch(self) -> ForeignArch:
        return ForeignArch(self._vocab)

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        assert self._runner is not None
        return [shape.spec(layer, block_size, kv_dtype) for layer, shape in self._runner.shapes.items()]

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        self._caches, self._groups = dict(caches), dict(groups)

    # --- running

    def forward(self, batch: Batch) -> Tensor:
        split, runner = self._split, self._runner
        assert split is not None
        _refuse_extras(batch, self.name)
        if isinstance(runner, ByRow):
            dtype = next(split.model.parameters()).dtype
            memory = PagedRows(batch.steps, self._caches, self._groups, dtype)
            return runner.run(batch, spans_of(batch.steps[0]), memory)
        assert runner is not None
        with runner.reading(BoundSource(batch, self._caches, self._groups)):
            return split.hidden(**inputs_of(split.model, batch.token_ids, batch.positions))

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        return self.narrow_logits(hidden, slots).float()

    def narrow_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        assert self._split is not None and slots is None  # `forward` refused a step with adapters
        return self._split.logits(hidden)


def _refuse_extras(batch: Batch, name: str) -> None:
    """Optional inputs of a step that the fallback does not support."""
    extras = {
        "input embeddings": batch.input_vectors,
        "adapters": batch.adapter_index,
        "several channels of positions": batch.position_channels,
        "an encoder's output": batch.encoded,
    }
    for what, brought in extras.items():
        if brought is not None:
            raise NotBuiltError(f"{name} runs through transformers' code, which does not support {what} here")


def fix_ropes(model: nn.Module, longest: int) -> None:
    """Rotary embeddings whose frequencies depend on the longest sequence of a batch get those of the longest sequence
    allowed, so a request's tokens do not depend on its neighbours."""
    for module in model.modules():
        kinds = module.__dict__.get("rope_type")
        named = kinds if isinstance(kinds, dict) else {None: kinds}
        moving = [layer for layer, kind in named.items() if isinstance(kind, str) and _moves(kind)]
        if not moving or not isinstance(kinds, dict | str):
            continue
        position = torch.tensor([[longest - 1]], device=next(model.parameters()).device)
        probe = torch.zeros((1, 1, 1), device=position.device)
        for layer in moving:
            module(probe, position) if layer is None else module(probe, position, layer)
            if isinstance(kinds, dict):
                kinds[layer] = "default"
        if isinstance(kinds, str):
            module.rope_type = "default"  # type: ignore[assignment]
        _log.info("rotary frequencies of %s are those of sequences of %d tokens", type(module).__name__, longest)


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
