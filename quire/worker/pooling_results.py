"""From pooled vectors to results: embeddings cut and normalised, classes with their activation, chosen columns.

In: vectors [N, width] of requests, with their resolved PoolingParams. Out: Pooled (float32, row-major), and reasons for
those whose numbers are not finite, or that could not be computed: the others' results stand. Requests with the same
parameters go through the head together. Must not know: rows,
plans, which positions were pooled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.base.log import logger
from quire.config.pooling import num_labels, pooling_type, tasks_of, term_pooling
from quire.models.pooled import PoolingModel
from quire.ops.copy import download
from quire.schema.params import PoolingParams
from quire.schema.step import Pooled

if TYPE_CHECKING:
    from quire.config.model import ModelConfig, PoolerConfig

log = logger(__name__)
NOT_FINITE = "the model produced a result that is not finite (NaN or infinite)"
Complete = Sequence[tuple[str, tuple[PoolingParams, Tensor]]]


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
            finite = bool(values.isfinite().all())
            for name, part in zip(names, values.split(sizes), strict=True):
                if not finite and not bool(part.isfinite().all()):
                    self.failed[name] = NOT_FINITE
                    continue
                part = part[0] if is_whole else part
                self.pooled[name] = Pooled(tuple(part.shape), "float32", part.contiguous().numpy().tobytes())
        self.groups.clear()


@torch.inference_mode()
def results_of(model: PoolingModel, rules: ResultRules, complete: Complete) -> PendingResults:
    """Results by request, and reasons for those that have none."""
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, (_, (params, _)) in enumerate(complete):
        columns = None if params.returned_token_ids is None else tuple(params.returned_token_ids)
        alike[params.task, params.use_activation, params.dimensions, columns].append(index)
    coming = PendingResults()
    for members in alike.values():
        _add_or_fail(model, rules, [complete[index] for index in members], coming)
    return coming


def _add_or_fail(model: PoolingModel, rules: ResultRules, requests: Complete, coming: PendingResults) -> None:
    """An error is that of the request it comes from: where several fail together, each is tried alone."""
    try:
        _add_results(model, rules, requests, coming)
    except Exception as wrong:
        if len(requests) > 1:
            for one in requests:
                _add_or_fail(model, rules, [one], coming)
            return
        log.exception("The result of a pooled request could not be computed")
        coming.failed[requests[0][0]] = f"the result could not be computed ({type(wrong).__name__})"


def _add_results(model: PoolingModel, rules: ResultRules, requests: Complete, coming: PendingResults) -> None:
    """Of requests with the same parameters: their names, rows of each, the values of all, whether each has one row."""
    params = requests[0][1][0]
    vectors = [model.term_weights(one) if rules.weighs_terms else one for _, (_, one) in requests]
    values = download(_values(model, rules, params, vectors[0] if len(vectors) == 1 else torch.cat(vectors)))
    is_whole = params.task in ("embed", "classify", "score")
    coming.groups.append(([name for name, _ in requests], [len(one) for one in vectors], values, is_whole))


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
