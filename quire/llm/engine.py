"""LLMEngine, turned step by step by its caller, and Front, which it shares with AsyncLLM.

Front owns what stands between callers and an engine: the client, the tokenizer, requests in flight and their metrics.
In: prompts and parameters. Out: RequestOutputs. LLMEngine calls `step()` itself; the engine runs in this process unless
QUIRE_ENABLE_V1_MULTIPROCESSING=1. LLM is built on it. Must not know: progress bars, lists of prompts, event loops.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.base.clock import now
from quire.base.collector import no_collections
from quire.base.log import logger
from quire.base.turns import ThreadTurns, in_turn
from quire.config.pooling import tasks_of
from quire.engine.adapters import located
from quire.engine.client import EngineClient, InProcessClient, PlacingClient
from quire.engine.connect import make_client
from quire.engine.control import VERBS
from quire.engine.inputs import InputProcessor, Options, PreparedRequest, default_params
from quire.engine.outputs import OutputProcessor, Processed
from quire.llm.verbs import refuse_stat_loggers, verb
from quire.observe.log_stats import LogStats
from quire.observe.metrics import Metrics, check_buckets
from quire.observe.reader import Metric
from quire.observe.tracers import make_tracer
from quire.observe.tracing import Tracer
from quire.schema.errors import ConfigError, EngineDeadError, InputError, QuireError, message_of
from quire.schema.messages import EngineReady, Outputs
from quire.schema.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.schema.params import PoolingParams, ResolvedParams, SamplingParams

if TYPE_CHECKING:
    from quire.config import CacheConfig, EngineArgs, EngineConfig
    from quire.observe.several import SeveralMetrics
    from quire.text.tokenizer import Tokenizer

log = logger(__name__)


class Front:
    def __init__(
        self,
        config: EngineConfig,
        *,
        own_process: bool,
        client: EngineClient | None = None,
        metrics_folder: str | None = None,
    ) -> None:
        """`client`: of an engine that runs. `metrics_folder`: where processes that share it keep their numbers."""
        self.config = config
        self.tasks = tasks_of(config.model_config)
        self.metrics_folder = metrics_folder
        check_buckets(config.observability_config.custom_histogram_buckets)
        self.tracer: Tracer | None = make_tracer(config)
        self.client: EngineClient = client or make_client(config, own_process=own_process)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:  # while the engine starts
                loading = pool.submit(_tokenizer, config)
                self.ready = self.client.wait_ready()
                self.tokenizer = loading.result()
            self.inputs = InputProcessor(config, self.tokenizer, self.ready)
        except BaseException as failed:
            if isinstance(self.client, PlacingClient) and isinstance(failed, Exception):
                self.client.begin_close(f"it could not start: {message_of(failed)}")
            self.client.close()
            raise
        self._placing = self.client if isinstance(self.client, PlacingClient) else None
        self._engine_metrics: list[Metrics] = []
        self.metrics: Metrics | SeveralMetrics | None = None
        self._log_stats: list[LogStats] = []
        if not config.disable_log_stats:
            self._measure()
        interval = config.scheduler_config.stream_interval
        self.outputs = OutputProcessor(
            self.tokenizer, stream_interval=interval, metrics=self._engine_metrics, tracer=self.tracer
        )

    def _measure(self) -> None:
        """Metrics of each engine, and lines about them in the log."""
        config, placing = self.config, self._placing
        readies = [self.ready] if placing is None else placing.readies
        ranks = [config.parallel_config.data_parallel_rank] if placing is None else placing.ranks
        for rank, ready in zip(ranks, readies, strict=True):
            metrics = Metrics(
                config.model_config.served_model_name,
                self.ready.max_model_len,
                rank,
                buckets=config.observability_config.custom_histogram_buckets,
                folder=self.metrics_folder,
                num_drafts=config.num_speculative_tokens,
            )
            metrics.cache_config(dataclasses.asdict(_measured_cache(config, ready)))
            if config.lora_config is not None:
                metrics.serve_adapters(config.lora_config.max_loras)
            self._engine_metrics.append(metrics)
        together: Metrics | SeveralMetrics = self._engine_metrics[0]
        if len(self._engine_metrics) > 1:
            from quire.observe.several import SeveralMetrics  # lazy

            together = SeveralMetrics(self._engine_metrics)
        self.metrics = together
        spoken: list[tuple[Metrics | SeveralMetrics, int | None]] = list(zip(self._engine_metrics, ranks, strict=True))
        if config.logging_config.aggregate_engine_logging and len(spoken) > 1:
            spoken = [(together, None)]
        for one, rank_or_all in spoken:
            log_stats = LogStats(one.totals, rank_or_all, folder=self.metrics_folder)
            log_stats.start()
            self._log_stats.append(log_stats)

    def prepare(
        self,
        request_id: str,
        prompt: object,
        params: SamplingParams | ResolvedParams | PoolingParams,
        options: Options | None = None,
    ) -> PreparedRequest:
        """Check and tokenize; nothing is in flight yet."""
        return self.inputs.process(request_id, prompt, params, options)

    def prepare_pooled(
        self, named: Sequence[tuple[str, object]], params: PoolingParams, options: Options
    ) -> list[PreparedRequest]:
        """The same of several prompts, each with its request's id, that have the same parameters."""
        return self.inputs.process_pooled(named, params, options)

    def submit(self, requests: Iterable[PreparedRequest]) -> None:
        """All of them, or none if one is refused."""
        if self.client.dead is not None:
            raise EngineDeadError(self.client.dead.reason)
        added: list[PreparedRequest] = []
        try:
            for one in requests:
                self.outputs.add(one)
                added.append(one)
                if self._placing is not None:
                    engine = self._placing.place(one.requests, one.data_parallel_rank)
                    self.outputs.place(one.request_id, engine)
            self.client.submit([request for one in added for request in one.requests])
        except BaseException:  # an interrupt may come when some are in the engine already
            self.abort([one.request_id for one in added])
            raise

    def take(self, news: Outputs) -> Processed:
        """An engine's outputs as results; whatever ended by its text is aborted in the engine."""
        if news.stats is not None and self._engine_metrics:
            self._engine_metrics[news.engine].step(news.stats)
        processed = self.outputs.process(news.outputs)
        self._abort_engine_requests(processed.aborts)
        return processed

    def abort(self, request_ids: Iterable[str]) -> Processed:
        processed = self.outputs.abort(request_ids)
        self._abort_engine_requests(processed.aborts)
        return processed

    def lost_engines(self) -> Mapping[int, str]:
        """Of several engines, those that are dead while others go on: why, by data-parallel rank."""
        return {} if self._placing is None else self._placing.lost

    def default_params(self) -> SamplingParams:
        return default_params(self.config)

    def snapshot(self) -> list[Metric]:
        if self.metrics is None:
            raise ConfigError("there are no metrics: start with disable_log_stats=False", param="disable_log_stats")
        return self.metrics.read()

    def say_stats(self) -> None:
        for log_stats in self._log_stats:
            log_stats.say()

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Another tokenizer for all that comes: Quire's own, or one of transformers. What holds answers to a form knows
        the model's."""
        from quire.text.tokenizer import Tokenizer  # lazy

        if not isinstance(tokenizer, Tokenizer):
            from quire.text.forms.foreign import wrap_tokenizer  # lazy

            tokenizer = wrap_tokenizer(tokenizer)
        if tokenizer.vocab_size > self.ready.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens; the model has {self.ready.vocab_size}",
                param="tokenizer",
            )
        self.tokenizer = tokenizer
        self.inputs.use_tokenizer(tokenizer)
        self.outputs.use_tokenizer(tokenizer)

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        self.note_call(verb)
        return self.client.call(verb, *args, timeout=timeout, **kwargs)

    def note_call(self, verb: str) -> None:
        """What a verb means for this side of the engine."""
        if verb == "reset_mm_cache":
            self.inputs.forget_media()

    def close(self) -> None:
        for log_stats in self._log_stats:
            log_stats.stop()
        self.inputs.close()
        self.client.close()
        self.outputs.clear()
        if self.tracer is not None:
            self.tracer.close()

    def _abort_engine_requests(self, request_ids: list[str]) -> None:
        if request_ids and self.client.dead is None:
            self.client.abort(request_ids)


def _tokenizer(config: EngineConfig) -> Tokenizer | None:
    model = config.model_config
    if model.skip_tokenizer_init:
        return None
    began = now()
    from quire.text.tokenizer import load_tokenizer  # lazy

    with no_collections():
        tokenizer = load_tokenizer(
            model.tokenizer,
            mode=model.tokenizer_mode,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            download_dir=config.load_config.download_dir,
        )
    log.debug("Tokenizer ready in %.2f s", now() - began)
    return tokenizer


def _measured_cache(config: EngineConfig, ready: EngineReady) -> CacheConfig:
    return config.cache_config.measured(ready.num_blocks, ready.max_concurrency, ready.max_model_len)


class EngineCore:
    """The control verbs of an engine as methods: engine_core.reset_prefix_cache()."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in VERBS:
            raise AttributeError(f"an engine has no verb {name!r}; it has {', '.join(sorted(VERBS))}")
        return functools.partial(self._client.call, name)


class FrontEngine:
    """What LLMEngine and AsyncLLM have in common: one Front, and the attributes of it that documented programs read."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.cache_config = _measured_cache(front.config, front.ready)
        self.vllm_config = dataclasses.replace(front.config, cache_config=self.cache_config)
        self.model_config = front.config.model_config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        return self.front.inputs

    @property
    def output_processor(self) -> OutputProcessor:
        return self.front.outputs


class LLMEngine(FrontEngine):
    def __init__(self, vllm_config: EngineConfig, *, own_process: bool = False) -> None:
        super().__init__(Front(vllm_config, own_process=own_process))
        self.engine_core = EngineCore(self.front.client)
        self.turns = ThreadTurns()
        self._told = threading.RLock()  # what was told of requests: by a thread that steps, or ends them
        self._results: list[
            RequestOutput | PoolingRequestOutput[PoolingOutput]
        ] = []  # results of a step that also had a failure to raise
        self._failures: list[tuple[str, Exception]] = []  # failed alone, and not raised yet

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: str | None = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        refuse_stat_loggers(stat_loggers)
        config = engine_args.create_engine_config(usage_context or "ENGINE_CONTEXT")
        return cls(config, own_process=enable_multiprocessing)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: str | None = None,
        stat_loggers: Any = None,
        disable_log_stats: bool | None = None,
    ) -> LLMEngine:
        refuse_stat_loggers(stat_loggers)
        if disable_log_stats is not None:
            vllm_config = dataclasses.replace(vllm_config, disable_log_stats=disable_log_stats)
        return cls(vllm_config)

    def add_request(
        self,
        request_id: str,
        prompt: object,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        options = Options(
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            arrival=arrival_time,
        )
        self.add([self.front.prepare(request_id, prompt, params, options)])

    def add(self, requests: Iterable[PreparedRequest]) -> None:
        """Requests that are prepared already: all of them, or none."""
        self.front.submit(requests)

    @in_turn
    def step(self) -> list[Any]:
        """One turn of the engine (in a process of its own: its next news). A request that fails alone is raised.
        Where several threads call it, each result is returned once, to whichever thread was there."""
        news = self.front.client.receive() if not self._failures and len(self.front.outputs) else None
        with self._told:
            if news is not None:
                processed = self.front.take(news)
                self._results += processed.results
                self._failures += processed.failures
            if self._failures:
                request_id, failed = self._failures.pop(0)
                if isinstance(failed, QuireError):
                    failed.request_id = request_id
                raise failed
            results, self._results = self._results, []
        return results

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        with self._told:
            self._failures = [failure for failure in self._failures if failure[0] not in ids]
            self._results = [result for result in self._results if result.request_id not in ids]
            self.front.abort(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to say yet: a request runs, or an end has not been reported."""
        return bool(len(self.front.outputs) or self._results or self._failures)

    def get_num_unfinished_requests(self) -> int:
        return len(self.front.outputs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes. False: running requests hold blocks and were not to be started again."""
        return bool(self.front.call("reset_prefix_cache", reset_running_requests, reset_connector))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """One result per worker. `method` is a worker's method, 'module:function', or a callable of the worker."""
        results: list[Any] = self.front.call("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return results

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = self.front.call("apply_model", func)
        return results

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A control verb of engine/control.py."""
        return self.front.call(name, *args, **kwargs)

    reset_mm_cache = verb("reset_mm_cache")
    sleep = verb("sleep")
    wake_up = verb("wake_up")
    is_sleeping = verb("is_sleeping")
    start_profile = verb("start_profile")
    stop_profile = verb("stop_profile")
    add_lora = verb("add_lora", located)
    remove_lora = verb("remove_lora")

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return set(self.call("list_loras"))

    pin_lora = verb("pin_lora")

    def close(self) -> None:
        self.front.close()

    # ---- what the documented attribute paths reach -------------------------------------------------------------

    @property
    def model_executor(self) -> Any:
        """Only in process: .driver_worker.worker.model_runner.model is the model."""
        client = self.front.client
        if not isinstance(client, InProcessClient):
            raise InputError(
                "model_executor lives in the engine's own process: use apply_model or collective_rpc, or run the "
                "engine in this process (QUIRE_ENABLE_V1_MULTIPROCESSING=0)"
            )
        return client.loop.executor

    def get_tokenizer(self) -> Tokenizer:
        return self.front.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Another tokenizer from now on, of Quire or transformers; no request may be under way."""
        if self.has_unfinished_requests():
            raise InputError(f"{self.get_num_unfinished_requests()} requests are under way: finish or abort them first")
        self.front.set_tokenizer(tokenizer)

    def get_metrics(self) -> list[Metric]:
        return self.front.snapshot()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.front.tasks

    def do_log_stats(self) -> None:
        self.front.say_stats()
