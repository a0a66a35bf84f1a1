"""The public results; picklable, so that they may cross a user's own processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from quire.base.log import logger, once

_log = logger(__name__)


@dataclass(slots=True)
class Logprob:
    """One token's log probability, its rank in the vocabulary (1 = most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """The same as a list of dicts, in six flat lists: the number of objects does not grow with the text."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        self.start_indices.append(len(self.logprobs))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.logprobs))

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position without making a dict for it."""
        self.start_indices.append(len(self.logprobs))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.logprobs))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            cut = FlatLogprobs()
            for i in range(*index.indices(len(self))):
                cut.append(self[i])
            return cut
        span = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in span}

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs grows at its end only: use append or extend")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs grows at its end only: entries cannot be deleted")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        raise TypeError("FlatLogprobs grows at its end only: use append or extend")


PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]


@dataclass
class RequestMetrics:
    """Times of one request, in seconds. `arrival_time` is wall clock; the others share the engine's monotonic clock."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # arrival to first token, as the caller saw it
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    routed_experts: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answer to one request, whole or as far as it has come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None, outputs: list[CompletionOutput], finished: bool,
        metrics: RequestMetrics | None = None, lora_request: Any = None, encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None, num_cached_tokens: int | None = None, *,
        kv_transfer_params: dict[str, Any] | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        """Whoever makes one for a later version may say more; what is not known here is left out."""
        if unknown:
            once(_log, logging.WARNING, "RequestOutput has no %s; it is left out", ", ".join(sorted(unknown)))
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.prompt_logprobs, self.outputs, self.finished = prompt_logprobs, outputs, finished
        self.metrics, self.lora_request, self.num_cached_tokens = metrics, lora_request, num_cached_tokens
        self.encoder_prompt, self.encoder_prompt_token_ids = encoder_prompt, encoder_prompt_token_ids
        self.kv_transfer_params = kv_transfer_params

    def add(self, later: RequestOutput, aggregate: bool = True) -> None:
        """Take in a later output of the same request: join the pieces (deltas), or replace (cumulative)."""
        self.finished |= later.finished
        self.metrics = later.metrics or self.metrics
        self.kv_transfer_params = later.kv_transfer_params or self.kv_transfer_params
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens if later.num_cached_tokens is None else later.num_cached_tokens
        mine = {output.index: i for i, output in enumerate(self.outputs)}
        for new in later.outputs:
            if new.index not in mine:
                self.outputs.append(new)
            elif aggregate:
                _join(self.outputs[mine[new.index]], new)
            else:
                self.outputs[mine[new.index]] = new


def _join(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids = [*old.token_ids, *new.token_ids]
    if new.logprobs:
        if old.logprobs is None:
            old.logprobs = new.logprobs
        else:
            old.logprobs.extend(new.logprobs)  # type: ignore[arg-type]
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason = new.finish_reason
    old.stop_reason = new.stop_reason


Result = TypeVar("Result")


@dataclass
class PoolingOutput:
    data: Any


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @staticmethod
    def from_base(base: PoolingOutput) -> EmbeddingOutput:
        return EmbeddingOutput(_as_list(base.data))


@dataclass
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @staticmethod
    def from_base(base: PoolingOutput) -> ClassificationOutput:
        return ClassificationOutput(_as_list(base.data))


@dataclass
class ScoringOutput:
    score: float

    @staticmethod
    def from_base(base: PoolingOutput) -> ScoringOutput:
        data = _as_list(base.data)
        return ScoringOutput(float(data[0]))


@dataclass
class PoolingRequestOutput(Generic[Result]):
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    pass


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    pass


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    pass


def _as_list(data: Any) -> list[float]:
    values = data.tolist() if hasattr(data, "tolist") else data
    return list(values) if isinstance(values, (list, tuple)) else [values]
