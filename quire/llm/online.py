"""AsyncLLM: many callers at once, each with its own stream of results. The engine runs in a process of its own.

In: generate(prompt, params, request_id). Out: an async generator of RequestOutputs. A caller that stops listening
(closes the generator, or is cancelled) has its request aborted. A slow caller gets results merged, never lost.
The client's thread turns outputs into results; each caller's event loop only picks them up.
Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from quire.base.clock import now
from quire.base.log import logger
from quire.engine.adapters import located
from quire.engine.inputs import Options, PreparedRequest, has_items
from quire.engine.outputs import Processed
from quire.llm.beam_limits import BeamLimits
from quire.llm.engine import Front, FrontEngine
from quire.llm.lanes import Lanes
from quire.llm.request_log import LogRules, RequestLog
from quire.llm.verbs import async_verb, refuse_stat_loggers
from quire.schema.errors import EngineDeadError, InputError, RefusedRequestError
from quire.schema.messages import Outputs
from quire.schema.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.schema.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config import EngineArgs, EngineConfig
    from quire.engine.client import EngineClient
    from quire.llm.beam_flow import BeamFlow
    from quire.llm.beam_form import BeamForms
    from quire.text.tokenizer import Tokenizer

log = logger(__name__)
Given = ParamSpec("Given")
Found = TypeVar("Found")
_MOST_WORK = BeamLimits()
LONG_TEXT = 4096  # characters; tokenizing less is quicker than going to another thread
_PER_PROMPT = 64  # what checking a prompt costs, in characters tokenized in the same time
_IDS_PER_CHARACTER = 16  # and token ids that are checked in that of one


class Flow:
    """Requests that were opened together, and their results as they come. Close it, or they run on.

    Whoever listens gets all that is new at once; what came since is merged, so a slow listener costs no memory, unless
    it has to tell which tokens a piece of text came with and says so (`merges`). Touched only by its event loop.
    """

    def __init__(
        self,
        streams: _Streams,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[PreparedRequest],
        log: RequestLog | None,
    ) -> None:
        self.loop = loop
        self._streams, self._log = streams, log
        self._delta = requests[0].params.output_kind is RequestOutputKind.DELTA
        self._growing = {one.request_id for one in requests}
        self.merges = True
        self._waiting: dict[str, Any] = {}  # RequestOutput, or the result of a request that is pooled: the last one
        self._earlier: list[RequestOutput] = []  # those that stay apart from it
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """All have ended well, and all was picked up."""
        return not self._growing and not self._waiting and self._error is None

    def put(self, result: RequestOutput | PoolingRequestOutput[PoolingOutput] | Exception) -> None:
        if isinstance(result, Exception):
            self._error = self._error or result
        else:
            if result.finished:
                self._growing.discard(result.request_id)
            if (earlier := self._waiting.get(result.request_id)) is None:
                self._waiting[result.request_id] = result
            elif self._delta and not self.merges:
                self._earlier.append(earlier)
                self._waiting[result.request_id] = result
            else:
                earlier.add(result, aggregate=self._delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[Any]:
        """What is new of any of them. Raises once one failed and what came before has been picked up. Not to be called
        once finished."""
        if not self._waiting and self._error is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._waiting:
            assert self._error is not None
            raise self._error
        results = [*self._earlier, *self._waiting.values()]
        self._waiting.clear()
        self._earlier.clear()
        if self._log is not None:
            for result in results:
                self._log.told(result)
        return results

    def close(self) -> None:
        """Nobody listens any more: what still runs is aborted."""
        if self._growing:
            if self._log is not None:
                for request_id in self._growing:
                    self._log.dropped(request_id)
            self._streams.leave(self._growing, self)
            self._growing = set()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def fail(self, error: Exception) -> None:
        """Close it under its listener, who gets this error. From its own event loop only."""
        self.close()
        self.put(error)


class _Streams:
    """Every stream, fed by the client's thread. Knows nothing of AsyncLLM, so that one can be collected."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._streams: dict[str, Flow] = {}
        self._lock = threading.Lock()  # over the front's requests in flight and the streams
        self.waiting_since = 0.0  # when the first of the streams now open was opened

    def open(
        self, requests: Sequence[PreparedRequest], loop: asyncio.AbstractEventLoop, log: RequestLog | None
    ) -> Flow:
        """One stream for all of them; they go together or not at all."""
        flow = Flow(self, loop, requests, log)
        request_ids = [one.request_id for one in requests]
        with self._lock:
            self._front.submit(requests)
            if not self._streams:
                self.waiting_since = now()
            for request_id in request_ids:
                self._streams[request_id] = flow
            dead = self._front.client.dead
        if dead is not None:  # it died while this came in; `died` may have run before
            self.abort(request_ids)
            raise EngineDeadError(dead.reason)
        return flow

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            processed = self._front.abort(request_ids)
            self._deliver(processed)

    def leave(self, request_ids: Iterable[str], flow: Flow) -> None:
        """Their caller listens no more. By now an id may be another request's, and that one goes on."""
        with self._lock:
            mine = [request_id for request_id in request_ids if self._streams.get(request_id) is flow]
            for request_id in mine:
                del self._streams[request_id]
            self._front.abort(mine)

    def request_ids(self) -> list[str]:
        with self._lock:
            return list(self._streams)

    def end_all(self, error: Exception) -> None:
        """Every caller gets this error, and the engine is instructed to stop working for them."""
        with self._lock:
            ids = list(self._streams)
            self._front.abort(ids)
            self._deliver(Processed(failures=[(request_id, error) for request_id in ids]))

    def take(self, outputs: Outputs) -> None:
        with self._lock:
            self._deliver(self._front.take(outputs))

    def died(self, error: EngineDeadError) -> None:
        with self._lock:
            lost = [(request_id, EngineDeadError(error.reason)) for request_id in self._streams]
            self._front.outputs.clear()
            self._deliver(Processed(failures=list(lost)))

    def _deliver(self, processed: Processed) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Flow, Any]]] = {}
        for result in processed.results:
            stream = self._streams.get(result.request_id)
            if result.finished:
                self._streams.pop(result.request_id, None)
            if stream is not None:
                ready.setdefault(stream.loop, []).append((stream, result))
        for request_id, error in processed.failures:
            if (stream := self._streams.pop(request_id, None)) is not None:
                ready.setdefault(stream.loop, []).append((stream, error))
        for loop, pairs in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # that event loop was closed: nobody listens any more
                gone = {id(stream) for stream, _ in pairs}
                ids = [request_id for request_id, stream in self._streams.items() if id(stream) in gone]
                for request_id in ids:
                    del self._streams[request_id]
                self._front.abort(ids)


def _put_all(pairs: list[tuple[Flow, Any]]) -> None:
    for stream, result in pairs:
        stream.put(result)


class AsyncLLM(FrontEngine):
    def __init__(
        self,
        vllm_config: EngineConfig,
        *,
        log_requests: bool = False,
        log_rules: LogRules | None = None,
        log_stats: bool | None = None,
        own_process: bool = True,
        client: EngineClient | None = None,
        metrics_folder: str | None = None,
    ) -> None:
        """`client` and `metrics_folder`: see Front."""
        if log_stats is not None and log_stats == vllm_config.disable_log_stats:
            vllm_config = dataclasses.replace(vllm_config, disable_log_stats=not log_stats)
        super().__init__(Front(vllm_config, own_process=own_process, client=client, metrics_folder=metrics_folder))
        self.log_requests = log_requests
        self._log = RequestLog(log_rules or LogRules()) if log_requests else None
        self.io_processor = None
        self._streams = _Streams(self.front)
        self.lanes = Lanes()
        self._stopped = False
        self.front.client.stream(self._streams)
        self._searches: weakref.WeakSet[BeamFlow] = weakref.WeakSet()
        self._made_later = contextlib.ExitStack()  # what the first request that needs it makes, to be closed
        self._finalizer = weakref.finalize(self, _close, self.front, self.lanes, self._made_later)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: str | None = None,
        stat_loggers: Any = None,
        *,
        enable_log_requests: bool | None = None,
    ) -> AsyncLLM:
        """The loop begins with the engine, whatever `start_engine_loop` says."""
        refuse_stat_loggers(stat_loggers)
        config = engine_args.create_engine_config(usage_context or "ENGINE_CONTEXT")
        configured = dataclasses.asdict(engine_args).get("enable_log_requests", False)
        return cls(config, log_requests=bool(configured if enable_log_requests is None else enable_log_requests))

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: str | None = None,
        stat_loggers: Any = None,
        *,
        enable_log_requests: bool = False,
        disable_log_stats: bool | None = None,
    ) -> AsyncLLM:
        refuse_stat_loggers(stat_loggers)
        log_stats = None if disable_log_stats is None else not disable_log_stats
        return cls(vllm_config, log_requests=enable_log_requests, log_stats=log_stats)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Results as they come. Leaving the generator aborts the request."""
        options = Options(
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
            seed=self.front.inputs.draw_seed(),
        )
        try:
            prepared = await self.prepare(request_id, _with_text(prompt, prompt_text), sampling_params, options)
        except InputError as wrong:
            if type(wrong) is not InputError:
                raise
            raise RefusedRequestError(str(wrong), param=wrong.param, value=wrong.value) from wrong
        with self.open([prepared]) as flow:
            while not flow.finished:
                for result in await flow.next():
                    yield result

    def open(self, requests: Sequence[PreparedRequest], *, logged: bool = True) -> Flow:
        """Submit prepared requests and listen to all of them at once. Their ids must be new and their kinds alike."""
        self._check_alive()
        log = self._log_asked(requests) if logged else None
        return self._streams.open(requests, asyncio.get_running_loop(), log)

    def _log_asked(self, requests: Sequence[PreparedRequest]) -> RequestLog | None:
        if self._log is not None:
            for one in requests:
                self._log.asked(one)
        return self._log

    def open_beams(
        self,
        requests: Sequence[PreparedRequest],
        params: BeamSearchParams,
        options: Options,
        most: BeamLimits = _MOST_WORK,
    ) -> BeamFlow:
        """Search for the best answers to prepared requests instead of running them as they are."""
        self._check_alive()
        size, shown = self.front.inputs.vocab_size, requests[0].params.logprobs or 0
        lengths = [one.requests[0].max_tokens for one in requests]
        most.check(params.beam_width, lengths, size if shown == -1 else shown, size)
        from quire.llm.beam_flow import BeamFlow  # lazy

        flow = BeamFlow(self, self._beam_forms, requests, params, options, most, self._log_asked(requests))
        self._searches.add(flow)
        return flow

    async def abort_searches(self, selects: Callable[[str], object]) -> int:
        """End the beam searches whose ids `selects` accepts: between two rounds the engine knows nothing of them."""
        return sum([await flow.abort(selects) for flow in list(self._searches)])

    @cached_property
    def _beam_forms(self) -> BeamForms:
        from quire.llm.beam_form import BeamForms  # lazy

        forms: BeamForms = BeamForms(self.vllm_config, self.front.inputs.vocab_size)
        self._made_later.callback(forms.close)
        return forms

    async def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, options: Options
    ) -> PreparedRequest:
        """Check and tokenize; nothing runs yet. What is long is read in another thread."""
        if prompt.has_media:
            prompt = await self.load_media(prompt)
        return await self.read(size_of([prompt], params), self.front.prepare, request_id, prompt, params, options)

    async def load_media(self, prompt: Prompt) -> Prompt:
        """Its media fetched, decoded and processed, which takes threads of their own."""
        inputs = self.front.inputs
        self._check_alive()
        if has_items(prompt):
            return prompt
        media = await self.lanes.run(LONG_TEXT, lambda: inputs.media)  # which may be made now
        if (known := media.known(prompt.loaded_media or prompt.media)) is not None:
            return msgspec.structs.replace(prompt, loaded_media=known)
        futures = await self.lanes.run(LONG_TEXT, inputs.begin_media, prompt)
        listed = [future for several in futures.values() for future in several]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, listed))
        finally:
            for future in listed:
                future.cancel()
        return msgspec.structs.replace(prompt, media=(), loaded_media=media.loaded(futures))

    async def read(self, size: int, work: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Do what tokenizes: at once where that is quick, else in a lane. `size`: how many characters."""
        self._check_alive()
        if size < LONG_TEXT:
            return work(*args, **kwargs)
        return await self.lanes.run(size, work, *args, **kwargs)

    async def encode(
        self,
        prompt: object,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The pooled result, once. Leaving the generator aborts the request."""
        options = Options(
            priority=priority, lora_request=lora_request, tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
        )  # fmt: skip
        pooling_params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(pooling_params, PoolingParams):
            raise InputError(f"pooling_params must be PoolingParams, got {type(pooling_params).__name__}")
        if truncate_prompt_tokens is not None:
            pooling_params = msgspec.structs.replace(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        prepared = await self.prepare(request_id, Prompt.of(prompt), pooling_params, options)
        from quire.llm.pooling import as_tensor  # lazy

        with self.open([prepared]) as flow:
            while not flow.finished:
                for result in await flow.next():
                    yield as_tensor(result)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """The stream of an aborted request ends with what it has, finish_reason 'abort'."""
        self._streams.abort([request_id] if isinstance(request_id, str) else list(request_id))

    # ---- control -----------------------------------------------------------------------------------------------

    async def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """A control verb of engine/control.py."""
        self.front.note_call(verb)
        future = self.front.client.begin_call(verb, *args, **kwargs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            if future.done():
                raise
            raise TimeoutError(f"no answer to {verb!r} within {timeout} s") from None

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        results: list[Any] = await self.call("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return results

    apply_model = async_verb("apply_model")
    reset_prefix_cache = async_verb("reset_prefix_cache")
    reset_mm_cache = async_verb("reset_mm_cache")
    pause_generation = async_verb("pause")
    resume_generation = async_verb("resume")
    is_paused = async_verb("is_paused")
    sleep = async_verb("sleep")
    wake_up = async_verb("wake_up")
    is_sleeping = async_verb("is_sleeping")
    start_profile = async_verb("start_profile")
    stop_profile = async_verb("stop_profile")
    add_lora = async_verb("add_lora", located)
    remove_lora = async_verb("remove_lora")

    async def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return set(await self.call("list_loras"))

    pin_lora = async_verb("pin_lora")
    scale_elastic_ep = async_verb("scale_elastic_ep")

    def stalled_for(self) -> float:
        """Seconds without a finished step although requests are in the engine; 0.0 when all is well."""
        waiting = self._streams.waiting_since if self._streams.request_ids() else None
        return self.front.client.pulse.silence(waiting)

    def end_all(self, error: Exception) -> None:
        """End every open request; its caller gets this error."""
        self._streams.end_all(error)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone."""
        self._check_alive()

    async def get_tokenizer(self) -> Tokenizer:
        return self.front.get_tokenizer()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.front.tasks

    async def is_tracing_enabled(self) -> bool:
        return self.front.tracer is not None

    async def do_log_stats(self) -> None:
        self.front.say_stats()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine. Requests in flight fail."""
        self._stopped = True
        self._finalizer()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.front.client.dead is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """It died, and not because it was asked to stop."""
        return self.is_stopped and not self._stopped

    @property
    def dead_error(self) -> EngineDeadError:
        return self.front.client.dead or EngineDeadError()

    def _check_alive(self) -> None:
        if self.front.client.dead is not None:
            raise EngineDeadError(self.front.client.dead.reason)


AsyncLLMEngine = AsyncLLM


def _with_text(prompt: object, text: str | None) -> Prompt:
    read = Prompt.of(prompt)
    return read if text is None or read.text is not None else msgspec.structs.replace(read, text=text)


def _close(front: Front, lanes: Lanes, made_later: contextlib.ExitStack) -> None:
    front.close()
    made_later.close()
    lanes.close()


def size_of(prompts: Sequence[Prompt], params: SamplingParams | PoolingParams) -> int:
    """What reading them costs, in characters that would be tokenized in the same time."""
    size = 0
    if isinstance(params, SamplingParams):
        size = 0 if params.structured_outputs is None else LONG_TEXT
        size += sum(map(len, params.bad_words or ()))
    elif params.returned_token_ids:
        size += len(prompts) * len(params.returned_token_ids)
    for prompt in prompts:
        ids = prompt.token_ids
        if prompt.embeds is not None or prompt.media is not None or prompt.media_uuids is not None:
            size += LONG_TEXT
        size += len(prompt.text or "") if ids is None else len(ids) // _IDS_PER_CHARACTER
        if prompt.encoder is not None:
            size += len(prompt.encoder.text or "")
    return size + _PER_PROMPT * (len(prompts) - 1)
