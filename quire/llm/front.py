"""What the three doors share: one engine client, the tokenizer, requests in flight, and their numbers.

In: prompts and parameters. Out: Processed results. LLMEngine turns it by hand, AsyncLLM lets a thread turn it.
Must not know: who waits for which result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.base import registry
from quire.base.clock import now
from quire.base.log import logger
from quire.engine.client import EngineClient, make_client
from quire.engine.inputs import Asked, InputProcessor, Options, default_params
from quire.engine.outputs import OutputProcessor, Processed
from quire.observe.log_stats import LogStats
from quire.observe.metrics import Metrics, check_buckets
from quire.observe.reader import Metric
from quire.observe.tracing import Tracer, make_tracer
from quire.schema.errors import ConfigError, EngineDeadError, InputError
from quire.schema.messages import Outputs
from quire.schema.params import SamplingParams

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.text.tokenizer import Tokenizer

log = logger(__name__)
LOAD_TOKENIZER = "quire.text.tokenizer:load_tokenizer"
TOKENIZER, FOREIGN_TOKENIZER = "quire.text.tokenizer:Tokenizer", "quire.text.forms.foreign:wrap_tokenizer"


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
        except BaseException:
            self.client.close()
            raise
        model = config.model_config
        self.metrics: Metrics | None = None
        self.log_stats: LogStats | None = None
        if not config.disable_log_stats:
            self.metrics = Metrics(
                model.served_model_name,
                self.ready.max_model_len,
                buckets=config.observability_config.custom_histogram_buckets,
                folder=metrics_folder,
            )
            self.metrics.cache_config(
                dataclasses.asdict(config.cache_config) | {"num_gpu_blocks": self.ready.num_blocks}
            )
            self.log_stats = LogStats(self.metrics.totals, folder=metrics_folder)
            self.log_stats.start()
        interval = config.scheduler_config.stream_interval
        self.outputs = OutputProcessor(
            self.tokenizer, stream_interval=interval, metrics=self.metrics, tracer=self.tracer
        )

    def prepare(self, request_id: str, prompt: object, params: SamplingParams, options: Options | None = None) -> Asked:
        """Check and tokenize; nothing is in flight yet."""
        return self.inputs.process(request_id, prompt, params, options)

    def submit(self, asked: Iterable[Asked]) -> None:
        """All of them, or none if one is refused."""
        if self.client.dead is not None:
            raise EngineDeadError(self.client.dead.reason)
        added: list[Asked] = []
        try:
            for one in asked:
                self.outputs.add(one)
                added.append(one)
            self.client.submit([request for one in added for request in one.requests])
        except BaseException:  # an interrupt may come when some are in the engine already
            self.abort([one.request_id for one in added])
            raise

    def take(self, news: Outputs) -> Processed:
        """An engine's outputs as results; whatever ended by its text is aborted in the engine."""
        if news.stats is not None and self.metrics is not None:
            self.metrics.step(news.stats)
        processed = self.outputs.process(news.outputs)
        self._abort_engine_requests(processed.aborts)
        return processed

    def abort(self, request_ids: Iterable[str]) -> Processed:
        processed = self.outputs.abort(request_ids)
        self._abort_engine_requests(processed.aborts)
        return processed

    def default_params(self) -> SamplingParams:
        return default_params(self.config)

    def snapshot(self) -> list[Metric]:
        if self.metrics is None:
            raise ConfigError("there are no metrics: start with disable_log_stats=False", param="disable_log_stats")
        return self.metrics.snapshot()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Another tokenizer for all that comes: Quire's own, or one of transformers. What holds answers to a form knows
        the model's."""
        if not isinstance(tokenizer, registry.load(TOKENIZER)):
            tokenizer = registry.load(FOREIGN_TOKENIZER)(tokenizer)
        if tokenizer.vocab_size > self.ready.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens; the model has {self.ready.vocab_size}",
                param="tokenizer",
            )
        self.tokenizer = tokenizer
        self.inputs.use_tokenizer(tokenizer)
        self.outputs.use_tokenizer(tokenizer)

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return self.client.call(verb, *args, timeout=timeout, **kwargs)

    def close(self) -> None:
        if self.log_stats is not None:
            self.log_stats.stop()
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
    tokenizer: Tokenizer = registry.load(LOAD_TOKENIZER)(
        model.tokenizer,
        mode=model.tokenizer_mode,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
        download_dir=config.load_config.download_dir,
    )
    log.debug("Tokenizer ready in %.2f s", now() - began)
    return tokenizer
