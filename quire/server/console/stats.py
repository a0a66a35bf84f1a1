"""GET /console/stats: what the engine view draws, as one small JSON object.

In: the totals and the last finished requests that observe/ keeps anyway. Out: counters since start, from which the page
makes rates, and timings without ids or text. Asks for a key wherever /metrics does without --open-metrics.
Must not know: pages, dialects.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from quire import __version__
from quire.observe.metrics import Ended, Metrics
from quire.server.errors import ERROR_RESPONSES
from quire.server.state import ServerState

if TYPE_CHECKING:
    from quire.observe.several import SeveralMetrics

PATH = "/console/stats"
router = APIRouter(tags=["admin"])


class EndedRequest(BaseModel):
    """One request that has ended. Seconds; of the phases it lived to see."""

    ago: float = Field(description="Since its end.")
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue: float | None = Field(description="From its arrival in the engine to its first step.")
    prefill: float | None = Field(description="From there to its first token.")
    decode: float | None = Field(description="From there to its last token.")
    total: float = Field(description="From its arrival at the server to its end.")


class EngineStats(BaseModel):
    version: str
    model: str
    uptime: float = Field(description="Seconds since the server started.")
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int = Field(description="Tokens that the KV cache has room for.")
    measured: bool = Field(description="Whether the engine's numbers are kept; --disable-log-stats switches them off.")
    running: int = 0
    waiting: int = 0
    kv_usage: float = Field(default=0.0, description="Share of KV blocks held, 0 to 1.")
    prompt_tokens: int = Field(default=0, description="Computed since start.")
    generated_tokens: int = Field(default=0, description="Since start.")
    prefix_queries: int = Field(default=0, description="Prompt tokens looked up in the prefix cache since start.")
    prefix_hits: int = Field(default=0, description="Of those, found.")
    preempted: int = Field(default=0, description="Preemptions since start.")
    ended: list[EndedRequest] = Field(default=[], description="The last to end in this process, newest first.")


@router.get(PATH, operation_id="console_stats", responses={401: ERROR_RESPONSES[401]})
async def console_stats(request: Request) -> EngineStats:
    """What the engine view of the page at / shows."""
    state: ServerState = request.app.state.quire
    front = state.engine.front
    facts = EngineStats(
        version=__version__,
        model=state.served.base.name,
        uptime=time.time() - state.started_at,
        max_model_len=front.ready.max_model_len,
        max_num_seqs=state.config.scheduler_config.max_num_seqs,
        kv_tokens=front.ready.num_blocks * front.ready.block_size,
        measured=front.metrics is not None,
    )
    return facts if front.metrics is None else facts.model_copy(update=_numbers(front.metrics))


def _numbers(metrics: Metrics | SeveralMetrics) -> dict[str, object]:
    totals = metrics.totals()
    return {
        "running": totals.running,
        "waiting": totals.waiting,
        "kv_usage": totals.kv_usage,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "prefix_queries": totals.queries,
        "prefix_hits": totals.hits,
        "preempted": totals.preempted,
        "ended": [_row(one) for one in reversed(list(metrics.ended))],
    }


def _row(one: Ended) -> EndedRequest:
    times = one.times
    began, first = times.scheduled > 0.0, times.first_token > 0.0
    return EndedRequest(
        ago=max(0.0, time.time() - one.at),
        finish_reason=one.finish_reason.value,
        prompt_tokens=one.num_prompt_tokens,
        cached_tokens=one.num_cached_tokens,
        generated_tokens=one.num_generation_tokens,
        queue=times.scheduled - times.queued if began else None,
        prefill=times.first_token - times.scheduled if first else None,
        decode=times.last_token - times.first_token if first else None,
        total=one.seconds,
    )
