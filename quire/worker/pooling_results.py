"""From pooled vectors to results: embeddings cut and normalised, classes with their activation, chosen columns.

In: vectors [N, width] of requests, with their resolved PoolingParams. Out: Pooled (float32, row-major), and reasons for
those whose numbers are not finite, or that could not be computed: the others' results stand. Requests with the same
parameters go through the head together. Must not know: rows,
plans, which positions were pooled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.base.log import logger
from quire.config.pooling import num_labels, pooling_type, tasks_of, term_pooling
from quire.models.pooled import PoolingModel
from quire.ops.copy import download
from quire.schema.params import PoolingParams
from quire.schema.step import Pooled
from quire.worker.own_fault import is_of_this_rank

if TYPE_CHECKING:
    from quire.config.model import ModelConfig, PoolerConfig

log = logger(__name__)
NOT_FINITE = "the model produced a result that is not finite (NaN or infinite)"


@dataclass(frozen=True)
class Complete:
    """Requests whose prompts are computed: parallel lists. Vectors of one each may lie in one tensor."""

    names: Sequence[str]
    params: Sequence[PoolingParams]
    vectors: Tensor | Sequence[Tensor]  # [requests, width], or [N, width] of each

    def __len__(self) -> int:
        return len(self.names)

    def only(self, members: Sequence[int]) -> Complete:
        """Some of them, in this order."""
        if len(members) == len(self):
            return self
        vectors = self.vectors
        if isinstance(vectors, Tensor):
            chosen: Tensor | list[Tensor] = vectors[torch.tensor(members, device=vectors.device)]
        else:
            chosen = [vectors[index] for index in members]
        return Complete([self.names[i] for i in members], [self.params[i] for i in members], chosen)

    def groups(self) -> list[Complete]:
        """Those with the same parameters together."""
        by_object: dict[int, list[int]] = {}
        for index, params in enumerate(self.params):
            by_object.setdefault(id(params), []).append(index)
        alike: dict[tuple[object, ...], list[int]] = {}
        for members in by_object.values():
            params = self.params[members[0]]
            columns = None if params.returned_token_ids is None else tuple(params.returned_token_ids)
            key = params.task, params.use_activation, params.dimensions, columns
            alike.setdefault(key, []).extend(members)
        return [self.only(sorted(members)) for members in alike.values()]


@dataclass(frozen=True)
class ResultRules:
    """What a model's results are made by, besides a request's own parameters."""

    pooler: PoolerConfig
    tasks: tuple[str, ...]
    activation: str  # of classes: softmax | sigmoid | ''
    weighs_terms: bool = False  # embeddings are weights of the vocabulary's terms, of all tokens of a text

    @classmethod
    def of(cls, model: ModelConfig) -> ResultRules:
        assert model.pooler_config is not None
        activation = class_activation(model) if model.convert in ("classify", "reward") else ""
        return cls(model.pooler_config, tasks_of(model), activation, bool(term_pooling(model)))

    def kind_of(self, task: str) -> str:
        if self.weighs_terms:
            return "ALL"
        return pooling_type(self.pooler, task)


def class_activation(model: ModelConfig) -> str:
    """As the checkpoint says; else sigmoid for one class, softmax for several. A reward is its raw value."""
    raw = model.hf_config
    sentence = raw.get("sentence_transformers")
    named = sentence.get("activation_fn") if isinstance(sentence, dict) else None
    named = str(named or raw.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if named in ("Sigmoid", "Identity"):
        return {"Sigmoid": "sigmoid", "Identity": ""}[named]
    problem = raw.get("problem_type")
    if problem == "regression":
        return ""
    if problem == "multi_label_classification":
        return "sigmoid"
    if model.convert == "reward":
        return (
            "softmax"
            if num_labels(model) > 1 or (model.pooler_config and model.pooler_config.returned_token_ids)
            else ""
        )
    return "sigmoid" if num_labels(model) == 1 else "softmax"


@dataclass
class PendingResults:
    """Results of one step on their way to the host: `pooled` and `failed` are whole once `arrive` was called."""

    groups: list[tuple[list[str], list[int], Tensor, bool]] = field(default_factory=list)  # see `_add_results`
    pooled: dict[str, Pooled] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def arrive(self) -> None:
        """The device is past the copies."""
        for names, sizes, values, is_whole in self.groups:
            values = values.contiguous()
            num_rows, width = values.shape
            finite = math.isfinite(values.sum().item())  # False also where the sum is too large: then each is looked at
            data = values.numpy().view(np.uint8).reshape(-1)
            row = end = 0
            for name, size in zip(names, sizes, strict=True):
                row, end, begin = row + size, end + 4 * size * width, end
                if not finite and not bool(values[row - size : row].isfinite().all()):
                    self.failed[name] = NOT_FINITE
                    continue
                self.pooled[name] = Pooled(
                    (width,) if is_whole else (size, width), "float32", data[begin:end].tobytes()
                )
            assert row == num_rows, f"{num_rows} rows of results for {row}"
        self.groups.clear()


@torch.inference_mode()
def results_of(model: PoolingModel, rules: ResultRules, complete: Complete) -> PendingResults:
    """Results by request, and reasons for those that have none."""
    coming = PendingResults()
    for group in complete.groups():
        _add_or_fail(model, rules, group, coming)
    return coming


def _add_or_fail(model: PoolingModel, rules: ResultRules, requests: Complete, coming: PendingResults) -> None:
    """An error is that of the request it comes from: where several fail together, each is tried alone."""
    try:
        _add_results(model, rules, requests, coming)
    except Exception as wrong:
        if model.storage.group.size > 1 and is_of_this_rank(wrong):
            raise  # heads sum over ranks, and the others do not try again
        if len(requests) > 1:
            for index in range(len(requests)):
                _add_or_fail(model, rules, requests.only([index]), coming)
            return
        log.exception("The result of a pooled request could not be computed")
        coming.failed[requests.names[0]] = f"the result could not be computed ({type(wrong).__name__})"


def _add_results(model: PoolingModel, rules: ResultRules, requests: Complete, coming: PendingResults) -> None:
    """Of requests with the same parameters: their names, rows of each, the values of all, whether each has one row."""
    params, vectors, sizes = requests.params[0], requests.vectors, [1] * len(requests)
    if not isinstance(vectors, Tensor):
        if rules.weighs_terms:
            vectors = [model.term_weights(one) for one in vectors]
        sizes = [len(one) for one in vectors]
        vectors = vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))
    values = download(_values(model, rules, params, vectors))
    is_whole = params.task in ("embed", "classify", "score")
    coming.groups.append((list(requests.names), sizes, values, is_whole))


def _values(model: PoolingModel, rules: ResultRules, params: PoolingParams, vectors: Tensor) -> Tensor:
    """[N, outputs] float32."""
    if params.task in ("embed", "token_embed"):
        values = model.embed(vectors)
        if params.dimensions is not None:
            values = values[:, : params.dimensions]
        return torch.nn.functional.normalize(values, dim=-1) if params.use_activation else values
    columns = params.returned_token_ids
    if columns is None:
        values = model.classify(vectors)
    else:
        values = model.columns(vectors, torch.tensor(columns, dtype=torch.int64, device=vectors.device))
    if rules.pooler.logit_mean is not None:
        values = values - rules.pooler.logit_mean
    if rules.pooler.logit_sigma is not None:
        values = values / rules.pooler.logit_sigma
    if not params.use_activation or not rules.activation:
        return values
    return values.softmax(-1) if rules.activation == "softmax" else values.sigmoid()
