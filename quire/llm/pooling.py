"""The pooling calls of LLM: encode, embed, classify, reward and score over many prompts, results in their order.

In: an LLM and what its caller gave. Out: lists of PoolingRequestOutput and its typed forms. Must not know: how a
request is run (LLM does), HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base.collector import no_collections
from quire.base.registry import load
from quire.engine.inputs import Options
from quire.llm.scoring import check_scoring, cosine, cross_prompts, floats, join_parts, max_sim, pair_up, texts_of
from quire.schema.errors import InputError
from quire.schema.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.schema.params import PoolingParams
from quire.schema.prompt import Prompt
from quire.schema.step import Pooled

if TYPE_CHECKING:
    from quire.engine.inputs import PreparedRequest
    from quire.llm.offline import LLM

Params = PoolingParams | Sequence[PoolingParams] | None
Result = PoolingRequestOutput[PoolingOutput]


class PoolingCalls:
    """The calls of an LLM of a pooling model."""

    def __init__(self, llm: LLM, run: Callable[[list[PreparedRequest], Any], list[Any]]) -> None:
        self._front, self._run = llm.llm_engine.front, run
        self._pooling = self._front.inputs.pooling  # an InputError where the model generates
        self._ids = llm.request_ids

    def pool(
        self, prompts: Sequence[Any], params: Params, task: str | None, use_tqdm: Any, options: Options,
        keep: int | None = None,
    ) -> list[Result]:  # fmt: skip
        """One result per prompt, as the worker made it."""
        each = self._params(params, len(prompts), task, keep)
        with no_collections():  # what is made stays until the call ends
            requests = [self._prepare(prompt, one, options) for prompt, one in zip(prompts, each, strict=True)]
            return self._run(requests, use_tqdm)

    def _prepare(self, prompt: Any, params: PoolingParams, options: Options) -> PreparedRequest:
        return self._front.prepare(str(next(self._ids)), prompt, params, options)

    def _params(self, params: Params, count: int, task: str | None, keep: int | None) -> list[PoolingParams]:
        if params is None or isinstance(params, PoolingParams):
            return [self._pooling.share(self._one(params, task, keep))] * count
        if not isinstance(params, Sequence) or isinstance(params, str):
            raise InputError(
                f"pooling_params must be PoolingParams or a list of them, got {type(params).__name__}",
                param="pooling_params",
            )
        if len(params) != count:
            raise InputError(f"{len(params)} pooling_params were given for {count} prompts", param="pooling_params")
        return [self._one(one, task, keep) for one in params]

    def _one(self, params: PoolingParams | None, task: str | None, keep: int | None) -> PoolingParams:
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InputError(f"pooling_params must be PoolingParams, got {type(params).__name__}")
        if task is not None and params.task not in (None, task):
            raise InputError(f"pooling_params ask for {params.task!r}, and the call is for {task!r}", param="task")
        changes: dict[str, Any] = {} if task is None else {"task": task}
        if keep is not None:
            changes["truncate_prompt_tokens"] = keep
        return msgspec.structs.replace(params, **changes)

    def encode(
        self, prompts: Sequence[Any], params: Params, task: str | None, use_tqdm: Any, options: Options,
        keep: int | None,
    ) -> list[Result]:  # fmt: skip
        return [as_tensor(result) for result in self.pool(prompts, params, task, use_tqdm, options, keep)]

    def classify(
        self, prompts: Sequence[Any], params: Params, use_tqdm: Any, options: Options, keep: int | None
    ) -> list[ClassificationRequestOutput]:
        return [as_classes(result) for result in self.pool(prompts, params, "classify", use_tqdm, options, keep)]

    def embed(
        self, prompts: Sequence[Any], params: Params, use_tqdm: Any, options: Options, keep: int | None
    ) -> list[EmbeddingRequestOutput]:
        with no_collections():
            return [as_embedding(result) for result in self._embed(prompts, params, use_tqdm, options, keep)]

    def _embed(
        self, prompts: Sequence[Any], params: Params, use_tqdm: Any, options: Options, keep: int | None
    ) -> list[Result]:
        """Inputs longer than the model takes are embedded in parts, where the configuration allows it."""
        pooling = self._pooling
        if not pooling.pooler.enable_chunked_processing or keep is not None:
            return self.pool(prompts, params, "embed", use_tqdm, options, keep)
        each = [pooling.resolve(one) for one in self._params(params, len(prompts), "embed", None)]
        groups = []
        for prompt in prompts:
            ids, _ = pooling.token_ids(Prompt.of(prompt), None, options.tokenization_kwargs or {})
            groups.append(pooling.parts(ids))
        requests = [
            self._prepare(list(part), whole_params(one, len(parts)), options)
            for parts, one in zip(groups, each, strict=True)
            for part in parts
        ]
        results = iter(self._run(requests, use_tqdm))
        return [joined([next(results) for _ in parts], parts, one) for parts, one in zip(groups, each, strict=True)]

    def score(
        self, data_1: Any, data_2: Any, params: PoolingParams | None, use_tqdm: Any, options: Options,
        keep: int | None, template: str | None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        pooling = self._pooling
        check_scoring(pooling)
        pairs = pair_up(texts_of(data_1, "data_1"), texts_of(data_2, "data_2"))
        if pooling.score_type == "cross-encoder":
            most = pooling.max_model_len if keep == -1 else keep  # -1: as many as the model takes
            prompts = cross_prompts(pooling, pairs, most, template)
            results = self.pool(prompts, params, "classify", use_tqdm, options, keep)
            return [scored(result, floats(result.outputs.data)[0]) for result in results]
        task = "token_embed" if pooling.score_type == "late-interaction" else "embed"
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        by_text = dict(zip(texts, self.pool(texts, params, task, use_tqdm, options, keep), strict=True))
        scores = []
        for first, second in pairs:
            one, other = by_text[first], by_text[second]
            a, b = one.outputs.data, other.outputs.data
            value = max_sim(a, b) if task == "token_embed" else cosine(floats(a), floats(b))
            both = one.prompt_token_ids + other.prompt_token_ids
            scores.append(scored(one, value, both, one.num_cached_tokens + other.num_cached_tokens))
        return scores


def whole_params(params: PoolingParams, num_parts: int) -> PoolingParams:
    """Of one part: a vector that is cut and normalised once all parts are joined."""
    return params if num_parts == 1 else msgspec.structs.replace(params, use_activation=False, dimensions=None)


def joined(results: Sequence[Result], parts: Sequence[tuple[int, ...]], params: PoolingParams) -> Result:
    if len(results) == 1:
        return results[0]
    weighed = [(result.outputs.data, len(part)) for result, part in zip(results, parts, strict=True)]
    pooled = join_parts(weighed, dimensions=params.dimensions, normalize=bool(params.use_activation))
    return PoolingRequestOutput(
        request_id=results[0].request_id, outputs=PoolingOutput(pooled),
        prompt_token_ids=[token for part in parts for token in part], finished=True,
        num_cached_tokens=sum(result.num_cached_tokens for result in results),
    )  # fmt: skip


def tensor_of(pooled: Pooled) -> Any:
    """A torch tensor: what programs expect of `outputs.data`."""
    flat = load("torch:frombuffer")(bytearray(pooled.data), dtype=load("torch:float32")) if pooled.data else None
    return load("torch:zeros")(pooled.shape) if flat is None else flat.view(pooled.shape)


def as_tensor(result: Result) -> Result:
    data = result.outputs.data
    return PoolingRequestOutput(**_common(result), outputs=PoolingOutput(tensor_of(data) if data is not None else None))


def as_embedding(result: Result) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        request_id=result.request_id, outputs=EmbeddingOutput(floats(result.outputs.data)),
        prompt_token_ids=result.prompt_token_ids, finished=result.finished, num_cached_tokens=result.num_cached_tokens,
    )  # fmt: skip


def as_classes(result: Result) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(**_common(result), outputs=ClassificationOutput(floats(result.outputs.data)))


def scored(
    result: Result, value: float, token_ids: list[int] | None = None, num_cached: int | None = None
) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=result.request_id, outputs=ScoringOutput(value),
        prompt_token_ids=result.prompt_token_ids if token_ids is None else token_ids, finished=True,
        num_cached_tokens=result.num_cached_tokens if num_cached is None else num_cached,
    )  # fmt: skip


def _common(result: Result) -> dict[str, Any]:
    """All but the outputs."""
    return {
        "request_id": result.request_id, "prompt_token_ids": result.prompt_token_ids, "finished": result.finished,
        "num_cached_tokens": result.num_cached_tokens,
    }  # fmt: skip
