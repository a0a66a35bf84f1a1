"""The pooling calls of LLM: encode, embed, classify, reward and score over many prompts, results in their order.

In: an LLM and what its caller gave. Out: lists of PoolingRequestOutput and its typed forms. Must not know: how a
request is run (LLM does), HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from quire.base.collector import no_collections
from quire.base.registry import load
from quire.engine.adapters import pair_adapters
from quire.engine.inputs import Options
from quire.llm.scoring import check_scoring, cosine, cross_prompts, floats, join_parts, max_sim, pair_up, texts_of
from quire.schema.errors import InputError, QuireError, name_prompt
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
    from quire.llm.engine import Front
    from quire.llm.offline import LLM
    from quire.schema.adapters import LoRARequest

Params = PoolingParams | Sequence[PoolingParams] | None
Result = PoolingRequestOutput[PoolingOutput]


class PoolingCalls:
    """The calls of an LLM of a pooling model."""

    def __init__(self, llm: LLM, run: Callable[..., list[Any]]) -> None:
        self._front, self._run = llm.llm_engine.front, run
        self._pooling = self._front.inputs.pooling  # an InputError where the model generates
        self._ids = llm.request_ids
        config = llm.llm_engine.vllm_config
        step, parallel = config.scheduler_config, config.parallel_config
        at_once = parallel.data_parallel_size * parallel.pipeline_parallel_size  # steps
        self._step = at_once * step.max_num_seqs, at_once * step.max_num_batched_tokens

    def pool(
        self, prompts: Sequence[Any], params: Params, task: str | None, use_tqdm: Any, options: Options,
        keep: int | None = None, made: Callable[[Result], Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """One result per prompt, as the worker made it, or what `made` makes of it."""
        each = self._params(params, len(prompts), task, keep)
        adapters = pair_adapters(options.lora_request, len(prompts))
        return self._run_all(prompts, each, adapters, use_tqdm, options, made)

    def _run_all(
        self, prompts: Sequence[Any], params: Sequence[PoolingParams], adapters: Sequence[LoRARequest | None],
        use_tqdm: Any, options: Options, made: Callable[[Result], Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        ids = [str(next(self._ids)) for _ in prompts]
        ahead = TextsAhead(self._front, ids, prompts, params, adapters, options, self._step)
        places = {} if made is None else {name: place for place, name in enumerate(ids)}  # {}: not the caller's prompts
        try:
            with no_collections(), ahead as coming:
                return self._run([], use_tqdm, coming, made)  # what is made stays until the call ends
        except QuireError as failed:
            name_prompt(failed, places, len(ids))
            raise

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
        return self.pool(prompts, params, task, use_tqdm, options, keep, as_tensor)

    def classify(
        self, prompts: Sequence[Any], params: Params, use_tqdm: Any, options: Options, keep: int | None
    ) -> list[ClassificationRequestOutput]:
        return self.pool(prompts, params, "classify", use_tqdm, options, keep, as_classes)

    def embed(
        self, prompts: Sequence[Any], params: Params, use_tqdm: Any, options: Options, keep: int | None
    ) -> list[EmbeddingRequestOutput]:
        """Inputs longer than the model takes are embedded in parts, where the configuration allows it."""
        pooling = self._pooling
        if not pooling.pooler.enable_chunked_processing or keep is not None:
            return self.pool(prompts, params, "embed", use_tqdm, options, keep, as_embedding)
        each = [pooling.resolve(one) for one in self._params(params, len(prompts), "embed", None)]
        kwargs = options.tokenization_kwargs or {}
        read = pooling.tokenized([Prompt.of(prompt) for prompt in prompts], kwargs, is_cut=False)
        groups = [pooling.parts(pooling.token_ids(prompt, None, kwargs)[0]) for prompt in read]
        adapters = pair_adapters(options.lora_request, len(prompts))
        all_parts = [(part, whole_params(one, len(parts)), adapter)
                     for parts, one, adapter in zip(groups, each, adapters, strict=True) for part in parts]  # fmt: skip
        inputs, own_params, own_adapters = zip(*all_parts, strict=True) if all_parts else ((), (), ())
        results = iter(self._run_all(inputs, own_params, own_adapters, use_tqdm, options))
        return [
            as_embedding(joined([next(results) for _ in parts], parts, one))
            for parts, one in zip(groups, each, strict=True)
        ]

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


class TextsAhead:
    """The prompts of a call as requests, prepared as the engine gets to them: while a device computes a step, the next
    ones are read, and texts after these are tokenized in a thread."""

    CHUNK = 128  # prompts that are prepared together

    def __init__(
        self, front: Front, ids: Sequence[str], prompts: Sequence[Any], params: Sequence[PoolingParams],
        adapters: Sequence[LoRARequest | None], options: Options, step: tuple[int, int],
    ) -> None:  # fmt: skip
        """`step`: requests and tokens that a step holds at most."""
        self.total = len(prompts)
        self._front, self._options, self._step = front, options, step
        places = [slice(at, at + self.CHUNK) for at in range(0, len(prompts), self.CHUNK)]
        self._left = iter([_Chunk(ids[one], prompts[one], params[one], adapters[one]) for one in places])
        self._tokenized = front.inputs.pooling.tokenized
        self._num_ready = self._num_tokens = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts ahead") if self.total > self.CHUNK else None
        self._next = self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def take(self, num_running: int) -> list[PreparedRequest]:
        """As much as fills a step, besides those that the engine may have under way."""
        new: list[PreparedRequest] = []
        steps = 1 if num_running == 0 else 3
        while self._next is not None and not self._fills(num_running + len(new), steps):
            new += self._prepare(self._next)
            self._next = self._begin()
        return new

    def _fills(self, count: int, steps: int) -> bool:
        tokens = count * self._num_tokens / max(1, self._num_ready)  # by the length of those before
        return count >= steps * self._step[0] or tokens >= steps * self._step[1]

    def _begin(self) -> _Chunk | None:
        """The next ones; texts among them are being tokenized."""
        chunk = next(self._left, None)
        if chunk is None or self._thread is None:
            return chunk
        prompts = [Prompt.of(prompt) for prompt in chunk.prompts]
        if any(prompt.has_media or prompt.embeds is not None for prompt in prompts):  # refused in their turn
            return chunk
        if all(prompt.token_ids is not None for prompt in prompts):
            return chunk._replace(prompts=prompts)
        kwargs = self._options.tokenization_kwargs or {}
        is_cut = bool(kwargs) or any(one.truncate_prompt_tokens is not None for one in chunk.params)
        return chunk._replace(tokenizing=self._thread.submit(self._tokenized, prompts, kwargs, is_cut=is_cut))

    def _prepare(self, chunk: _Chunk) -> list[PreparedRequest]:
        prompts = chunk.prompts if chunk.tokenizing is None else chunk.tokenizing.result()
        named = list(zip(chunk.ids, prompts, strict=True))
        ready: list[PreparedRequest] = []
        for _, alike in groupby(range(len(named)), lambda i: (id(chunk.params[i]), id(chunk.adapters[i]))):
            of_one = list(alike)
            first, adapter = of_one[0], chunk.adapters[of_one[0]]
            options = self._options
            if adapter is not options.lora_request:
                options = msgspec.structs.replace(options, lora_request=adapter)
            ready += self._front.prepare_pooled(named[first : of_one[-1] + 1], chunk.params[first], options)
        self._num_ready += len(ready)
        self._num_tokens += sum(len(one.token_ids) for one in ready)
        return ready


class _Chunk(NamedTuple):
    ids: Sequence[str]
    prompts: Sequence[Any]
    params: Sequence[PoolingParams]
    adapters: Sequence[LoRARequest | None]
    tokenizing: Future[list[Prompt]] | None = None  # the prompts with token ids


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
