"""From an engine's news (EngineOutput) to what callers get (RequestOutput).

Owns: every request in flight on the caller's side: its text so far, log probabilities, stop strings, the merge of n
answers into one, and what each output kind shows when. Out: results to deliver, requests that failed, and engine
requests to abort because their text has ended before the engine knew. Must not know: where the engine is.

    EngineOutput ──▶ Answer (one of n) ──▶ Open (a caller's request) ──▶ RequestOutput
                     ids, text, logprobs     prompt, times, merge
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine.inputs import PreparedRequest
from quire.engine.logprobs import LogprobList
from quire.observe.metrics import Metrics
from quire.observe.tracing import RequestTrace, Tracer
from quire.schema.errors import EngineDeadError, EngineGenerateError, InputError, rebuild_error
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from quire.schema.params import RequestOutputKind, ResolvedParams
from quire.schema.stats import RequestTimes
from quire.schema.step import Pooled

if TYPE_CHECKING:
    from quire.text.detokenize import Detokenizer
    from quire.text.tokenizer import Tokenizer


@dataclass
class Processed:
    results: list[RequestOutput | PoolingRequestOutput[PoolingOutput]] = field(default_factory=list)
    failures: list[tuple[str, Exception]] = field(default_factory=list)  # request id, why it alone is lost
    aborts: list[str] = field(default_factory=list)  # engine requests that need not go on


class OutputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        metrics: Sequence[Metrics] = (),
        tracer: Tracer | None = None,
    ) -> None:
        """`metrics`: of each engine, in the order of their places; none: nothing is measured."""
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._metrics = metrics
        self._tracer = tracer
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, tuple[_Open, _OutputState]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    def request_ids(self) -> list[str]:
        return list(self._open)

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """For requests from now on."""
        self._tokenizer = tokenizer

    def place(self, request_id: str, engine: int) -> None:
        """Of several engines, this one runs it."""
        self._open[request_id].engine = engine

    def add(self, prepared: PreparedRequest) -> None:
        taken = [r.request_id for r in prepared.requests if r.request_id in self._answers]
        if prepared.request_id in self._open or taken:
            raise InputError(
                f"request_id {prepared.request_id!r} is already in use by a running request",
                param="request_id",
                value=prepared.request_id,
            )
        entry = _Open(prepared, self._tokenizer)
        self._open[prepared.request_id] = entry
        for answer in entry.answers:
            self._answers[answer.request_id] = (entry, answer)

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        done = Processed()
        touched: dict[str, _Open] = {}
        current = time.time()
        for output in outputs:
            open_answer = self._answers.get(output.request_id)
            if open_answer is None:
                continue  # ended here before the engine knew
            entry, answer = open_answer
            if output.finish_reason is FinishReason.ERROR:
                if not output.error_kind or _ran(output) or _is_lost(output):  # it did not merely meet a refusal
                    self._measure_failure(entry, answer, output, current)
                elif output.limit and self._metrics:
                    self._metrics[0].rejected(output.limit)  # counted for all engines together
                done.aborts.extend(self._forget(entry, besides=answer))
                done.failures.append((entry.prepared.request_id, _error_of(output)))
                touched.pop(entry.prepared.request_id, None)
                continue
            self._measure(entry, answer, output, current)
            if output.prompt_logprobs is not None and entry.prompt_logprobs is not None:
                entry.prompt_logprobs.extend(output.prompt_logprobs)
            if answer.take(output):
                done.aborts.append(answer.request_id)
            if answer.finish_reason is not None:
                del self._answers[answer.request_id]
                entry.num_growing -= 1
                self._measure_end(entry, answer, current)
            if entry.num_growing == 0 or entry.kind is not RequestOutputKind.FINAL_ONLY:
                touched[entry.prepared.request_id] = entry
        for request_id, entry in touched.items():
            if (result := entry.tell(self._interval)) is not None:
                done.results.append(result)
            if entry.num_growing == 0:
                del self._open[request_id]
        return done

    def abort(self, request_ids: Iterable[str]) -> Processed:
        """End requests now, by the caller's wish: their last results say 'abort'. Unknown ids are ignored."""
        done = Processed()
        for request_id in request_ids:
            entry = self._open.get(request_id)
            if entry is None:
                continue
            running = [answer for answer in entry.answers if answer.finish_reason is None]
            done.aborts.extend(self._forget(entry))
            for answer in running:
                answer.finish_reason = FinishReason.ABORT
                entry.num_growing -= 1
                self._measure_end(entry, answer, time.time())
            if (result := entry.tell(self._interval)) is not None:
                done.results.append(result)
        return done

    def clear(self) -> None:
        self._open.clear()
        self._answers.clear()

    def _forget(self, entry: _Open, besides: _OutputState | None = None) -> list[str]:
        """Drop a request; returns what the engine must abort."""
        self._open.pop(entry.prepared.request_id, None)
        ids = [a.request_id for a in entry.answers if self._answers.pop(a.request_id, None) and a is not besides]
        return ids

    def _measure(self, entry: _Open, answer: _OutputState, output: EngineOutput, current: float) -> None:
        if not output.new_token_ids:
            return
        first = not answer.token_ids
        gap = current - answer.last_seen
        answer.last_seen = current
        if first and not entry.first_seen:
            entry.first_seen = current
        if not self._metrics:
            return
        metrics = self._metrics[entry.engine]
        if first:
            metrics.prompt_done(len(entry.prepared.token_ids), output.num_cached_tokens)
            metrics.token_times(first=current - entry.prepared.arrival)
        else:
            metrics.token_times(gaps=[gap])

    def _measure_failure(self, entry: _Open, failed: _OutputState, output: EngineOutput, current: float) -> None:
        """The one that failed counts as an error, its siblings end with it."""
        failed.times = output.times or failed.times
        for answer in entry.answers:
            if answer.finish_reason is None:
                answer.finish_reason = FinishReason.ERROR if answer is failed else FinishReason.ABORT
                entry.num_growing -= 1
                self._measure_end(entry, answer, current, output.error)

    def _measure_end(self, entry: _Open, answer: _OutputState, current: float, error: str | None = None) -> None:
        if self._tracer is not None and entry.num_growing == 0:
            self._tracer.ended(entry.trace(current, error))
        if not self._metrics or answer.finish_reason is None:
            return
        metrics = self._metrics[entry.engine]
        metrics.request_finished(
            answer.times,
            arrival=entry.prepared.arrival,
            now=current,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=len(entry.prepared.token_ids),
            num_generation_tokens=len(answer.token_ids),
            params=entry.prepared.params,
            num_cached_tokens=answer.num_cached_tokens,
        )
        if entry.num_growing == 0:
            most = max(len(a.token_ids) for a in entry.answers)
            metrics.parent_finished(entry.prepared.params.n, most)


class _OutputState:
    """One of a request's n answers, growing."""

    def __init__(self, index: int, request: EngineRequest, params: ResolvedParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request_id = request.request_id
        self.params = params
        self.token_ids: list[int] = []
        self.logprobs: LogprobList | None = None
        if params.logprobs is not None or params.logprob_token_ids:
            self.logprobs = LogprobList(params, tokenizer, num_ranked=params.logprobs or 0)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.times = RequestTimes()
        self.num_cached_tokens = 0
        self.last_seen = 0.0
        self.pooled: Pooled | None = None
        self.num_sent = 0  # tokens that a result has shown
        self.sent_end = False
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            from quire.text.detokenize import Detokenizer  # lazy

            self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params)
        self._watched = bool(params.stop) and self._detokenizer is not None  # each token may end the text
        self._only_deltas = params.output_kind is RequestOutputKind.DELTA and not self._watched
        self._num_fed = 0
        self._has_stop_token = False  # its last token is one that ended it, and no part of the text

    def take(self, output: EngineOutput) -> bool:
        """Grow by an engine's news. True: the answer ended here, and the engine must be informed."""
        if output.times is not None:
            self.times = output.times
        if output.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.pooled is not None:
            self.pooled = output.pooled
        new_ids, reason = output.new_token_ids, output.finish_reason
        if self._watched:
            new_ids = new_ids[: self._watch(new_ids, reason is FinishReason.STOP)]
        self.token_ids += new_ids
        if self.logprobs is not None and output.logprobs is not None:
            self.logprobs.extend(output.logprobs, len(new_ids))
        if self.finish_reason is not None:  # by its text; the engine may have ended it too
            return reason is None
        if reason is not None:
            self.finish_reason, self.stop_reason = reason, output.stop_reason
            self._has_stop_token = reason is FinishReason.STOP and bool(output.new_token_ids)
        return False

    def _watch(self, new_ids: Sequence[int], stop_terminated: bool) -> int:
        """Turn ids into text up to a stop string; returns how many belong to the answer."""
        assert self._detokenizer is not None
        for used, token_id in enumerate(new_ids, 1):
            stop = self._detokenizer.feed([token_id], stop_terminated=stop_terminated and used == len(new_ids))
            if stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop
                return used
        return len(new_ids)

    def _text(self, delta: bool) -> str:
        """Unwatched text is made when it is shown, all at once."""
        if self._detokenizer is None:
            return ""
        if self._only_deltas:
            new_ids, self._num_fed = self.token_ids[self._num_fed :], len(self.token_ids)
            stopped, finished = self._has_stop_token, self.finish_reason is not None
            return self._detokenizer.next_delta(new_ids, stop_terminated=stopped, finished=finished)
        if not self._watched and self._num_fed < len(self.token_ids):
            new_ids = self.token_ids[self._num_fed :]
            self._detokenizer.feed(new_ids, stop_terminated=self._has_stop_token)
            self._num_fed = len(self.token_ids)
        return self._detokenizer.take(self.finish_reason is not None, delta)

    def due(self, interval: int) -> bool:
        """Whether a streamed result should show this answer now."""
        if self.finish_reason is not None:
            return not self.sent_end
        grown = len(self.token_ids) - self.num_sent
        return grown > 0 and (self.num_sent == 0 or grown >= interval)

    def show(self, delta: bool) -> CompletionOutput:
        ended = self.finish_reason is not None
        begin = self.num_sent if delta else 0
        text = self._text(delta)
        self.num_sent, self.sent_end = len(self.token_ids), ended
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[begin:],
            cumulative_logprob=None if self.logprobs is None else self.logprobs.total,
            logprobs=None if self.logprobs is None else self.logprobs.sample(begin, final=ended),
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )


class _Open:
    """A caller's request until all its answers have ended."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.prepared = prepared
        self.engine = 0  # its place among several
        params = prepared.params
        self.is_pooled = prepared.pooling is not None
        self.kind = RequestOutputKind.FINAL_ONLY if self.is_pooled else params.output_kind
        self.first_seen = 0.0
        tokenizer = None if self.is_pooled else tokenizer
        self.answers = [_OutputState(i, r, params, tokenizer) for i, r in enumerate(prepared.requests)]
        self.prompt_logprobs: LogprobList | None = None
        if (num_ranked := params.prompt_logprobs) is not None:
            self.prompt_logprobs = LogprobList(params, tokenizer, num_ranked=num_ranked, prompt=True)
        self.num_growing = len(self.answers)
        self._prompt_sent = False  # the prompt's log probabilities
        self._prompt_token_ids: list[int] | None = None  # as callers know it; one list for all results

    def tell(self, interval: int) -> RequestOutput | PoolingRequestOutput[PoolingOutput] | None:
        """What the caller should see now, if anything."""
        finished = self.num_growing == 0
        if self.is_pooled:
            return self._pooled() if finished else None
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        interval = self.prepared.stream_interval or interval
        answers = self.answers
        due = answers if len(answers) == 1 and answers[0].due(interval) else [a for a in answers if a.due(interval)]
        if not due and not finished:
            return None
        delta = self.kind is RequestOutputKind.DELTA
        shown = [answer.show(delta) for answer in (due if delta else answers)]
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is not None:  # sent when whole: the first answer, which brings them, may be behind others
            whole = finished or len(prompt_logprobs) == len(self.prepared.token_ids)
            prompt_logprobs = prompt_logprobs if whole and not (delta and self._prompt_sent) else None
            self._prompt_sent |= whole
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(self.prepared.token_ids)
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs.prompt(),
            outputs=shown,
            finished=finished,
            metrics=self._metrics() if finished or not delta else None,
            num_cached_tokens=self.answers[0].num_cached_tokens,
            lora_request=self.prepared.lora_request,
            encoder_prompt=self.prepared.encoder_text,
            encoder_prompt_token_ids=None if self.prepared.encoder_ids is None else list(self.prepared.encoder_ids),
        )

    def _pooled(self) -> PoolingRequestOutput[PoolingOutput]:
        """Of an aborted request, without data."""
        answer = self.answers[0]
        return PoolingRequestOutput(
            request_id=self.prepared.request_id,
            outputs=PoolingOutput(answer.pooled),
            prompt_token_ids=list(self.prepared.token_ids),
            finished=True,
            num_cached_tokens=answer.num_cached_tokens,
        )

    def trace(self, ended: float, error: str | None) -> RequestTrace:
        prepared = self.prepared
        return RequestTrace(
            request_id=prepared.request_id,
            headers=prepared.requests[0].trace_headers,
            params=prepared.params,
            max_tokens=prepared.requests[0].max_tokens,
            num_prompt_tokens=len(prepared.token_ids),
            metrics=self._metrics(),
            ended=ended,
            finish_reasons=tuple(a.finish_reason.value for a in self.answers if a.finish_reason is not None),
            error=error,
            forward_seconds=sum(answer.times.forward for answer in self.answers),
            execute_seconds=sum(answer.times.execute for answer in self.answers),
        )

    def _metrics(self) -> RequestMetrics:
        times = [answer.times for answer in self.answers]
        started = [t for t in times if t.scheduled] or times[:1]
        return RequestMetrics(
            arrival_time=self.prepared.arrival,
            queued_ts=min(t.queued for t in started),
            scheduled_ts=min(t.scheduled for t in started),
            first_token_ts=min(t.first_token for t in started),
            last_token_ts=max(t.last_token for t in times),
            first_token_latency=max(0.0, self.first_seen - self.prepared.arrival) if self.first_seen else 0.0,
            num_generation_tokens=sum(len(answer.token_ids) for answer in self.answers),
            num_preemptions=sum(t.num_preemptions for t in times),
        )


def _ran(output: EngineOutput) -> bool:
    return output.times is not None and output.times.scheduled > 0.0


def _is_lost(output: EngineOutput) -> bool:
    """Its engine died, of several."""
    return output.error_kind == EngineDeadError.__name__


def _error_of(output: EngineOutput) -> Exception:
    reason = output.error or "the engine gave no reason"
    return rebuild_error(output.error_kind, reason) if output.error_kind else EngineGenerateError(reason)
