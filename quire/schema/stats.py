"""One record per step and one per request; every sink (log line, metrics, traces) reads these and nothing else."""

from __future__ import annotations

import msgspec


class RequestTimes(msgspec.Struct, kw_only=True):
    """Seconds on the engine's monotonic clock (0.0: has not happened)."""

    queued: float = 0.0
    scheduled: float = 0.0  # first grant
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix-cache counters, totals since start or since the last reset."""

    queries: int = 0  # prompt tokens looked up
    hits: int = 0  # prompt tokens found


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one engine. Counts are of this step unless they say total."""

    step: int
    running: int
    waiting: int
    prompt_tokens: int  # computed now
    generated_tokens: int
    preempted: int
    kv_usage: float  # share of blocks held, 0..1
    cache: CacheStats = CacheStats()
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    commit_seconds: float = 0.0
