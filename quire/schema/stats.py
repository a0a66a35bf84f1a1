"""One record per step and one per request; every sink (log line, metrics, traces) reads these and nothing else."""

from __future__ import annotations

from itertools import zip_longest

import msgspec


class RequestTimes(msgspec.Struct, kw_only=True):
    """Seconds on the engine's monotonic clock (0.0: has not happened)."""

    queued: float = 0.0
    scheduled: float = 0.0  # first grant
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    forward: float = 0.0  # of the steps it was in; only with collect_detailed_traces
    execute: float = 0.0


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups in a cache: prompt tokens in the prefix cache, or media items in the encoder cache."""

    queries: int = 0
    hits: int = 0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(queries=self.queries + other.queries, hits=self.hits + other.hits)


NO_LOOKUPS = CacheStats()


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts that were verified."""

    num_drafts: int = 0  # times that drafts of a row were
    num_tokens: int = 0  # how many that were in all
    accepted: tuple[int, ...] = ()  # how many of them were right, by position; positions behind the last one: none

    def __add__(self, other: DraftStats) -> DraftStats:
        pairs = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return DraftStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_tokens=self.num_tokens + other.num_tokens,
            accepted=tuple([a + b for a, b in pairs]),
        )


NO_DRAFTS = DraftStats()


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one engine. Counts are of this step unless they say total."""

    step: int
    running: int
    waiting: int  # for room
    deferred: int = 0  # held back although there may be room: the engine is paused
    prompt_tokens: int  # computed now
    generated_tokens: int
    preempted: int
    kv_usage: float  # share of blocks held, 0..1
    cache: CacheStats = CacheStats()
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    commit_seconds: float = 0.0
    running_adapters: tuple[str, ...] = ()  # names of those that running requests have
    waiting_adapters: tuple[str, ...] = ()
    drafts: DraftStats = NO_DRAFTS
    media: CacheStats = NO_LOOKUPS  # items, of which those that needed no encoding are hits


class StartPhase(msgspec.Struct, frozen=True):
    """One stretch of an engine's start. `inside` names the phase that contains it; "" for those that add up to all.

    The outer phases, in order: device (import torch, start CUDA), load (build the model, weights), profile (what a step
    needs), kv (allocate the cache), warm_up (first steps, graphs). The inner ones are what a worker measured.
    """

    name: str
    seconds: float
    inside: str = ""
