"""The metrics of one engine, as the process that talks to it sees them.

Comes in: StepStats once per step, and per request its first token, its later tokens and its end. Goes out: snapshot(),
the reader's types, and totals() for the log line. Several processes may share one engine: each counts its own requests
and the steps it is told of (each step is told to one of them), and every snapshot is of all of them together.
Must not know: where the numbers come from, or how a page of them is served. declared.py is the table.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.observe.declared import ACCEPTED_PER_POSITION, TABLE, MetricDeclaration, drafts_table
from quire.observe.reader import Counter, Gauge, Metric, Vector
from quire.observe.sheet import Sheet
from quire.schema.errors import ConfigError
from quire.schema.messages import FinishReason
from quire.schema.params import ResolvedParams
from quire.schema.stats import DraftStats, RequestTimes, StepStats

__all__ = ["TABLE", "Ended", "MetricDeclaration", "Metrics", "Totals", "check_buckets", "one_two_five"]

_INFO, _ADAPTERS = "vllm:cache_config_info", "vllm:lora_requests_info"
_PREFIX = "vllm:"
MOST_ENDED = 24


class Totals(NamedTuple):
    """What the log line is made of: counts since start, and the last step's state."""

    prompt_tokens: int  # computed
    generated_tokens: int
    preempted: int
    queries: int
    hits: int
    running: int
    waiting: int
    kv_usage: float
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()


class Ended(NamedTuple):
    """A request that has ended, for whoever wants to see single ones. Nothing here says whose it was."""

    at: float  # wall-clock seconds
    seconds: float  # since its arrival
    times: RequestTimes
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int


class Metrics:
    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        engine_index: int = 0,
        *,
        buckets: Mapping[str, tuple[float, ...]] | None = None,
        folder: str | None = None,
        num_drafts: int = 0,
    ) -> None:
        """`folder` is where processes that share an engine keep their numbers; None: there is only this one.
        `num_drafts`: per row and step at most; 0: nothing is drafted."""
        self._num_drafts = num_drafts
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._info: dict[str, str] = {}
        self._max_loras = 0  # 0: no adapters are served
        self._adapters: tuple[tuple[str, ...], tuple[str, ...], float] = ((), (), 0.0)  # running, waiting, when
        self.ended: deque[Ended] = deque(maxlen=MOST_ENDED)  # the last of this process
        self.sheet = Sheet(
            (*check_buckets(buckets), *(drafts_table(num_drafts) if num_drafts else ())),
            kind=f"engine{engine_index}", lengths=one_two_five(max_model_len), folder=folder,
        )  # fmt: skip
        self.sheet.preset("vllm:engine_sleep_state", 1.0, "awake")  # sleep mode is not in this version

    def cache_config(self, labels: Mapping[str, object]) -> None:
        """Said once at start: what vllm:cache_config_info tells."""
        self._info = {name: str(value) for name, value in labels.items()}

    def serve_adapters(self, max_loras: int) -> None:
        """Said once at start."""
        self._max_loras = max_loras

    def step(self, stats: StepStats) -> None:
        sheet = self.sheet
        if self._max_loras:
            self._adapters = stats.running_adapters, stats.waiting_adapters, time.time()
        sheet.set("vllm:num_requests_running", stats.running)
        sheet.set("vllm:num_requests_waiting", stats.waiting + stats.deferred)
        sheet.set("vllm:num_requests_waiting_by_reason", stats.waiting, "capacity")
        sheet.set("vllm:num_requests_waiting_by_reason", stats.deferred, "deferred")
        sheet.set("vllm:kv_cache_usage_perc", stats.kv_usage)
        if stats.preempted:
            sheet.add("vllm:num_preemptions", stats.preempted)
        sheet.add("vllm:generation_tokens", stats.generated_tokens)
        if stats.cache.queries:
            sheet.add("vllm:prefix_cache_queries", stats.cache.queries)
            sheet.add("vllm:prefix_cache_hits", stats.cache.hits)
        if self._num_drafts or stats.media.queries:
            self._count_drafts_and_media(stats)
        if tokens := stats.prompt_tokens + stats.generated_tokens:
            sheet.observe("vllm:iteration_tokens_total", tokens)

    def _count_drafts_and_media(self, stats: StepStats) -> None:
        if stats.media.queries:
            self.sheet.add("vllm:mm_cache_queries", stats.media.queries)
            self.sheet.add("vllm:mm_cache_hits", stats.media.hits)
        if stats.drafts.num_drafts:
            self._count_drafts(stats.drafts)

    def _count_drafts(self, drafts: DraftStats) -> None:
        sheet = self.sheet
        sheet.add("vllm:spec_decode_num_drafts", drafts.num_drafts)
        sheet.add("vllm:spec_decode_num_draft_tokens", drafts.num_tokens)
        sheet.add("vllm:spec_decode_num_accepted_tokens", sum(drafts.accepted))
        for position, count in enumerate(drafts.accepted):
            sheet.add(ACCEPTED_PER_POSITION, count, str(position))

    def token_times(self, *, first: float | None = None, gaps: Sequence[float] = ()) -> None:
        """Seconds from arrival to the first token, and between later tokens."""
        if first is not None:
            self.sheet.observe("vllm:time_to_first_token_seconds", first)
        for gap in gaps:
            self.sheet.observe("vllm:inter_token_latency_seconds", gap)

    def prompt_done(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's first token has come, so its prompt is processed."""
        sheet = self.sheet
        sheet.add("vllm:prompt_tokens", num_prompt_tokens)
        sheet.add("vllm:prompt_tokens_by_source", num_prompt_tokens - num_cached_tokens, "local_compute")
        if num_cached_tokens:
            sheet.add("vllm:prompt_tokens_cached", num_cached_tokens)
            sheet.add("vllm:prompt_tokens_by_source", num_cached_tokens, "local_cache_hit")
            sheet.add("vllm:prompt_tokens_cached_by_source", num_cached_tokens, "local_cache_hit")

    def request_finished(
        self,
        times: RequestTimes,
        *,
        arrival: float,
        now: float,
        finish_reason: FinishReason,
        num_prompt_tokens: int,
        num_generation_tokens: int,
        params: ResolvedParams,
        num_cached_tokens: int = 0,
    ) -> None:
        """One sequence has ended. `arrival` and `now` share one clock, `times` has the engine's."""
        observe = self.sheet.observe
        self.sheet.add("vllm:request_success", 1, finish_reason.value)
        observe("vllm:e2e_request_latency_seconds", now - arrival)
        observe("vllm:request_prompt_tokens", num_prompt_tokens)
        observe("vllm:request_generation_tokens", num_generation_tokens)
        observe("vllm:request_prefill_kv_computed_tokens", num_prompt_tokens - num_cached_tokens)
        observe("vllm:request_num_preemptions", times.num_preemptions)
        if params.max_tokens is not None:
            observe("vllm:request_params_max_tokens", params.max_tokens)
        self._observe_phases(times, num_generation_tokens)
        counts = (num_prompt_tokens, num_cached_tokens, num_generation_tokens)
        self.ended.append(Ended(now, now - arrival, times, finish_reason, *counts))

    def parent_finished(self, n: int, max_generation_tokens: int) -> None:
        """All n sequences of a caller's request have ended."""
        self.sheet.observe("vllm:request_params_n", n)
        self.sheet.observe("vllm:request_max_num_generation_tokens", max_generation_tokens)

    def rejected(self, reason: str) -> None:
        """A request was refused because the queue is full; the option that says how full it may be."""
        self.sheet.add("vllm:admission_rejections", 1, reason)

    def totals(self) -> Totals:
        sheet = self.sheet
        generated = sheet.number("vllm:generation_tokens")
        drafted: dict[str, Any] = {}
        if self._num_drafts:
            by_position = [int(sheet.number(ACCEPTED_PER_POSITION, str(i))) for i in range(self._num_drafts)]
            drafted = {
                "num_drafts": int(sheet.number("vllm:spec_decode_num_drafts")),
                "draft_tokens": int(sheet.number("vllm:spec_decode_num_draft_tokens")),
                "accepted_tokens": int(sheet.number("vllm:spec_decode_num_accepted_tokens")),
                "accepted_by_position": tuple(by_position),
            }
        return Totals(
            prompt_tokens=int(sheet.sum_of("vllm:iteration_tokens_total") - generated),
            generated_tokens=int(generated),
            preempted=int(sheet.number("vllm:num_preemptions")),
            queries=int(sheet.number("vllm:prefix_cache_queries")),
            hits=int(sheet.number("vllm:prefix_cache_hits")),
            running=int(sheet.number("vllm:num_requests_running")),
            waiting=int(sheet.number("vllm:num_requests_waiting")),
            kv_usage=sheet.number("vllm:kv_cache_usage_perc"),
            **drafted,
        )

    def snapshot(self) -> list[Metric]:
        """Every metric as it is now, in the order of the table."""
        infos: dict[str, Metric | None] = {_INFO: None, _ADAPTERS: None}
        if self._info:
            infos[_INFO] = Gauge(_INFO, self._labels | self._info, 1.0)
        if self._max_loras:
            running, waiting, when = self._adapters
            names = {"running_lora_adapters": ",".join(running), "waiting_lora_adapters": ",".join(waiting)}
            infos[_ADAPTERS] = Gauge(_ADAPTERS, self._labels | names | {"max_lora": str(self._max_loras)}, when)
        return [one for metric in self.sheet.read(self._labels) if (one := infos.get(metric.name, metric)) is not None]

    def read(self) -> list[Metric]:
        """The same as Python programs see it: counters by position are one Vector."""
        metrics: list[Metric] = []
        accepted: list[int] = []
        for metric in self.snapshot():
            if isinstance(metric, Counter) and metric.name == ACCEPTED_PER_POSITION:
                if not accepted:
                    labels = {name: value for name, value in metric.labels.items() if name != "position"}
                    metrics.append(Vector(metric.name, labels, accepted))
                accepted.append(metric.value)
            else:
                metrics.append(metric)
        return metrics

    def _observe_phases(self, times: RequestTimes, num_generation_tokens: int) -> None:
        """Only phases the request lived to see: one that was aborted while it waited has no decode time."""
        if not times.scheduled:
            return
        observe = self.sheet.observe
        observe("vllm:request_queue_time_seconds", times.scheduled - times.queued)
        if not times.first_token:
            return
        decode = times.last_token - times.first_token
        observe("vllm:request_prefill_time_seconds", times.first_token - times.scheduled)
        observe("vllm:request_decode_time_seconds", decode)
        observe("vllm:request_inference_time_seconds", times.last_token - times.scheduled)
        if num_generation_tokens > 1:
            observe("vllm:request_time_per_output_token_seconds", decode / (num_generation_tokens - 1))


def check_buckets(custom: Mapping[str, tuple[float, ...]] | None) -> tuple[MetricDeclaration, ...]:
    """The table, with other limits for the histograms that were named (with or without the prefix)."""
    custom = custom or {}
    left = {name if name.startswith(_PREFIX) else _PREFIX + name: bounds for name, bounds in custom.items()}
    table = []
    for entry in TABLE:
        bounds = left.pop(entry.name, None) if entry.kind == "histogram" else None
        if bounds is not None and (not bounds or list(bounds) != sorted(set(bounds))):
            raise ConfigError(
                f"custom_histogram_buckets: limits of {entry.name} must be growing numbers, got {list(bounds)}",
                param="custom_histogram_buckets",
            )
        table.append(entry if bounds is None else dataclasses.replace(entry, buckets=tuple(map(float, bounds))))
    if left:
        known = ", ".join(entry.name for entry in TABLE if entry.kind == "histogram")
        raise ConfigError(
            f"custom_histogram_buckets: no histogram is called {', '.join(left)}; there are {known}",
            param="custom_histogram_buckets",
        )
    return tuple(table)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds: list[float] = []
    power = 1
    while power <= limit:
        bounds.extend(float(m * power) for m in (1, 2, 5) if m * power <= limit)
        power *= 10
    return tuple(bounds)
