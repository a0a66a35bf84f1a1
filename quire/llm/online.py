"""AsyncLLM: many callers at once, each with its own stream of results. The engine runs in a process of its own.

In: generate(prompt, params, request_id). Out: an async generator of RequestOutputs. A caller that stops listening
(closes the generator, or is cancelled) has its request aborted. A slow caller gets results merged, never lost.
The client's thread turns outputs into results; each caller's event loop only picks them up.
Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base.log import logger
from quire.engine.inputs import Asked, Options
from quire.engine.outputs import Processed
from quire.llm.front import Front
from quire.llm.verbs import async_verb
from quire.schema.errors import EngineDeadError, InputError, NotBuiltError
from quire.schema.messages import Outputs
from quire.schema.outputs import RequestOutput
from quire.schema.params import RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config import EngineArgs, EngineConfig
    from quire.text.tokenizer import Tokenizer

log = logger(__name__)
_LONG_TEXT = 4096  # characters; tokenizing less is quicker than going to another thread


class _Stream:
    """Results of one request that its caller has not picked up yet. Touched only by the caller's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, delta: bool) -> None:
        self.loop = loop
        self._delta = delta
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, result: RequestOutput | Exception) -> None:
        if isinstance(result, Exception):
            self._error = result
        elif self._waiting is None:
            self._waiting = result
        else:
            self._waiting.add(result, aggregate=self._delta)
        self._news.set()

    async def next(self) -> RequestOutput:
        await self._news.wait()
        result, self._waiting = self._waiting, None
        if result is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return result


class _Streams:
    """Every stream, fed by the client's thread. Knows nothing of AsyncLLM, so that one can be collected."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()  # over the front's requests in flight and the streams

    def open(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> _Stream:
        stream = _Stream(loop, delta=asked.params.output_kind is RequestOutputKind.DELTA)
        with self._lock:
            self._front.submit([asked])
            self._streams[asked.request_id] = stream
            dead = self._front.client.dead
        if dead is not None:  # it died while this came in; `died` may have run before
            self.abort([asked.request_id])
            raise EngineDeadError(dead.reason)
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            processed = self._front.abort(request_ids)
            self._deliver(processed)

    def leave(self, request_id: str, stream: _Stream) -> None:
        """Its caller listens no more. By now the id may be another request's, and that one goes on."""
        with self._lock:
            if self._streams.get(request_id) is stream:
                self._deliver(self._front.abort([request_id]))

    def request_ids(self) -> list[str]:
        with self._lock:
            return list(self._streams)

    def take(self, outputs: Outputs) -> None:
        with self._lock:
            self._deliver(self._front.take(outputs))

    def died(self, error: EngineDeadError) -> None:
        with self._lock:
            lost = [(request_id, EngineDeadError(error.reason)) for request_id in self._streams]
            self._front.outputs.clear()
            self._deliver(Processed(failures=list(lost)))

    def _deliver(self, processed: Processed) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput | Exception]]] = {}
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


def _put_all(pairs: list[tuple[_Stream, RequestOutput | Exception]]) -> None:
    for stream, result in pairs:
        stream.put(result)


class AsyncLLM:
    def __init__(self, vllm_config: EngineConfig, *, log_requests: bool = False, log_stats: bool | None = None) -> None:
        if log_stats is not None and log_stats == vllm_config.disable_log_stats:
            vllm_config = dataclasses.replace(vllm_config, disable_log_stats=not log_stats)
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_requests = log_requests
        self.front = Front(vllm_config, own_process=True)
        self.io_processor = None
        self._streams = _Streams(self.front)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._stopped = False
        self.front.client.stream(self._streams)
        self._finalizer = weakref.finalize(self, _close, self.front, self._pool)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: str | None = None, *, enable_log_requests: bool | None = None
    ) -> AsyncLLM:
        config = engine_args.create_engine_config(usage_context or "ENGINE_CONTEXT")
        asked = dataclasses.asdict(engine_args).get("enable_log_requests", False)
        return cls(config, log_requests=bool(asked if enable_log_requests is None else enable_log_requests))

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, *, enable_log_requests: bool = False) -> AsyncLLM:
        return cls(vllm_config, log_requests=enable_log_requests)

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
        self._check_alive()
        loop = asyncio.get_running_loop()
        asked = await self._prepare(request_id, _with_text(prompt, prompt_text), sampling_params, options)
        if self.log_requests:
            log.info("Request %s: %d prompt tokens, %s", request_id, len(asked.token_ids), asked.params)
        stream = self._streams.open(asked, loop)
        finished = False
        try:
            while not finished:
                result = await stream.next()
                finished = result.finished
                yield result
        finally:
            if not finished:  # closed, cancelled, or failed: then there is nothing left to abort
                self._streams.leave(request_id, stream)

    async def _prepare(self, request_id: str, prompt: Prompt, params: SamplingParams, options: Options) -> Asked:
        if prompt.token_ids is not None or len(prompt.text or "") < _LONG_TEXT:
            return self.front.prepare(request_id, prompt, params, options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.front.prepare, request_id, prompt, params, options)

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        raise NotBuiltError("encode: pooling models are not in this version of Quire")
        yield

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """The stream of an aborted request ends with what it has, finish_reason 'abort'."""
        self._streams.abort([request_id] if isinstance(request_id, str) else list(request_id))

    # ---- control -----------------------------------------------------------------------------------------------

    async def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """A control verb of engine/control.py."""
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
        found: list[Any] = await self.call("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return found

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
    add_lora = async_verb("add_lora")
    remove_lora = async_verb("remove_lora")
    list_loras = async_verb("list_loras")
    pin_lora = async_verb("pin_lora")
    scale_elastic_ep = async_verb("scale_elastic_ep")

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone."""
        self._check_alive()

    async def get_tokenizer(self) -> Tokenizer:
        if self.front.tokenizer is None:
            raise InputError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return self.front.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        if self.front.log_stats is not None:
            self.front.log_stats.say()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine. Requests in flight fail."""
        self._stopped = True
        self._finalizer()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    @property
    def input_processor(self) -> Any:
        return self.front.inputs

    @property
    def output_processor(self) -> Any:
        return self.front.outputs

    @property
    def is_running(self) -> bool:
        return self.front.client.dead is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """It died, and not because it was told to."""
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


def _close(front: Front, pool: ThreadPoolExecutor) -> None:
    front.close()
    pool.shutdown(wait=False, cancel_futures=True)
