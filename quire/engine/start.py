"""The engine's composition root: build executor, KV layout and scheduler into a loop, in whichever process calls it.

In: a resolved EngineConfig. Out: the loop, and what clients are told of it. The only engine file that knows concrete
classes of many packages. Must not know: who the clients are, or how they reach the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from quire.base.clock import Laps, now
from quire.base.log import logger
from quire.config.local import object_of
from quire.engine.adapters import EngineAdapters
from quire.engine.charge import Charge
from quire.engine.loop import EngineLoop
from quire.engine.masking import make_masks
from quire.engine.pulse import Pulse
from quire.executor.base import (
    Executor,
    StepwiseExecutor,
    WorkerProtocol,
    least_by_stage,
    make_executor,
    one_model,
)
from quire.sched.kv_layout import fit_length, max_concurrency, place
from quire.sched.scheduler import Scheduler
from quire.schema.errors import ConfigError
from quire.schema.kv import KVLayout, ModelInfo
from quire.schema.messages import EngineReady
from quire.schema.stats import StartPhase

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.config import EngineConfig
    from quire.engine.lockstep import Lockstep
    from quire.observe.kv_events import EventPublisher
    from quire.schema.media import MediaItem

log = logger(__name__)


class Started(NamedTuple):
    loop: EngineLoop
    ready: EngineReady


def start_engine(
    config: EngineConfig, pulse: Pulse | None = None, wake: Callable[[int], None] | None = None
) -> Started:
    """Load the model, place the KV cache, warm up. `wake`: tells engines that have experts together with this one of a
    step."""
    laps = Laps()
    began = now()
    scheduler_class = _scheduler_class(config)  # located before the model is loaded, as are addresses for events
    kv_events = _event_publisher(config)
    trial = _media_trial(config)
    executor = make_executor(config)
    try:
        if trial is not None:
            trial.result()
        laps.mark("device")
        media = _largest_media(config)
        infos = executor.ask(WorkerProtocol.load)
        info = one_model(infos)
        laps.mark("load")
        if media is not None:
            executor.ask(WorkerProtocol.measure_media, media.result())
        free_bytes = least_by_stage(infos, executor.ask(WorkerProtocol.free_bytes))
        laps.mark("profile")
        layout, max_model_len = _place_beside(config, executor, infos, free_bytes, with_media=media is not None)
        executor.ask(WorkerProtocol.init_kv, layout)
        laps.mark("kv")
        executor.ask(WorkerProtocol.warm_up)
        laps.mark("warm_up")
    except BaseException:
        executor.shutdown()
        if kv_events is not None:
            kv_events.close()
        raise
    depth = config.max_concurrent_batches
    scheduler = scheduler_class(config, layout, max_model_len=max_model_len, depth=depth)
    phases = _phases(laps, executor)
    seconds = {phase.name: phase.seconds for phase in phases if not phase.inside} | {"total": now() - began}
    ready = EngineReady(
        num_blocks=layout.num_blocks,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=config.cache_config.block_size * config.parallel_config.decode_context_parallel_size,
        max_concurrency=max_concurrency(layout, max_model_len, config.scheduler_config.max_num_batched_tokens),
        start_seconds=seconds,
        phases=phases,
        pid=os.getpid(),
    )
    log.info("Engine ready in %.1f s (%s): %d KV blocks", seconds["total"], _told(phases), layout.num_blocks)
    masks = make_masks(config, info.vocab_size, ends_slow=not isinstance(executor, StepwiseExecutor))
    slots = scheduler.planner.adapters
    adapters = None if slots is None else EngineAdapters(executor, slots)
    loop = EngineLoop(
        executor, scheduler, pulse=pulse, masks=masks, kv_events=kv_events, adapters=adapters,
        lockstep=None if wake is None else _lockstep(executor, wake),
    )  # fmt: skip
    if config.observability_config.collect_detailed_traces:
        loop.charge = Charge(scheduler.requests)
    return Started(loop, ready)


def _media_trial(config: EngineConfig) -> Future[None] | None:
    """Of a model that takes media: whether it can, before it is loaded."""
    model = config.model_config
    options = model.multimodal_config
    if not model.facts.modalities or (options is not None and options.language_model_only):
        return None
    from quire.engine.media_trial import begin_trial  # lazy

    trial: Future[None] = begin_trial(model)
    return trial


def _largest_media(config: EngineConfig) -> Future[tuple[MediaItem, ...]] | None:
    """Made while the model is loaded. None: the memory of encoders is not measured."""
    model = config.model_config
    measures = config.device_config.device != "cpu" and config.cache_config.kv_cache_memory_bytes is None
    if not measures or not model.takes_encoder or model.is_encoder_decoder or model.is_pooling:
        return None
    if model.multimodal_config is not None and model.multimodal_config.skip_mm_profiling:
        return None
    from quire.engine.largest_media import make_largest  # lazy

    items: Future[tuple[MediaItem, ...]] = make_largest(model)
    return items


def _lockstep(executor: Executor, wake: Callable[[int], None]) -> Lockstep:
    from quire.engine.lockstep import Lockstep  # lazy

    made: Lockstep = Lockstep(executor, wake)
    return made


def _event_publisher(config: EngineConfig) -> EventPublisher | None:
    """As kv_events_config says; None: nothing is published."""
    events = config.kv_events_config
    if events is None:
        return None
    if not events.publishes:
        if events.publisher == "zmq":
            log.warning("kv_events_config names a publisher, but enable_kv_cache_events is off: nothing is published")
        return None
    if not config.cache_config.enable_prefix_caching:
        log.warning("KV events are on and prefix caching is off: there is nothing to publish")
    from quire.observe.kv_events import EventPublisher  # lazy

    parallel = config.parallel_config
    publisher: EventPublisher = EventPublisher(
        events.endpoint,
        replay_endpoint=events.replay_endpoint,
        data_parallel_rank=parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None,
        topic=events.topic,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
        max_queue_size=events.max_queue_size,
    )
    return publisher


def _scheduler_class(config: EngineConfig) -> type[Scheduler]:
    named = config.scheduler_config.scheduler_cls
    if named is None:
        return Scheduler
    try:
        located = object_of(named)
    except ImportError as wrong:
        raise ConfigError(f"scheduler_cls {named!r} cannot be imported: {wrong}", param="scheduler_cls") from None
    if not (isinstance(located, type) and issubclass(located, Scheduler)):
        raise ConfigError(
            f"scheduler_cls {named!r} is not made from quire.sched.scheduler.Scheduler", param="scheduler_cls"
        )
    return located


def _phases(laps: Laps, executor: Executor) -> tuple[StartPhase, ...]:
    """The engine's own phases, and after each what the worker measured inside it."""
    try:
        inner = executor.call("start_laps", [], {}, None)[0]
    except AttributeError:  # a worker of somebody else's, which measures nothing
        inner = []
    phases: list[StartPhase] = []
    for name, seconds, _ in laps.taken:
        phases += [StartPhase(*lap) for lap in inner if lap[2] == name]
        phases.append(StartPhase(name, seconds))
    return tuple(phases)


def _told(phases: tuple[StartPhase, ...]) -> str:
    """device 4.31 (cuda 0.40), load 0.52, ..."""
    words = []
    for phase in phases:
        if not phase.inside:
            parts = ", ".join(f"{p.name} {p.seconds:.2f}" for p in phases if p.inside == phase.name)
            words.append(f"{phase.name} {phase.seconds:.2f}" + (f" ({parts})" if parts else ""))
    return ", ".join(words)


def _place_beside(
    config: EngineConfig, executor: Executor, infos: list[ModelInfo], free_bytes: list[int], *, with_media: bool
) -> tuple[KVLayout, int]:
    """Beside what is left for the encoder of media; with nothing left for it, where the KV cache would be too small."""
    info = one_model(infos)
    try:
        return _place(config, info, free_bytes)
    except ConfigError as wrong:
        if not with_media:
            raise
        log.warning("No memory is left for the encoder of media (skip_mm_profiling): %s", wrong)
    executor.ask(WorkerProtocol.measure_media, ())
    return _place(config, info, least_by_stage(infos, executor.ask(WorkerProtocol.free_bytes)))


def _place(config: EngineConfig, info: ModelInfo, free_bytes: list[int]) -> tuple[KVLayout, int]:
    """The KV layout, and the context length: the one requested, or (-1) the longest that fits."""
    num_blocks = config.cache_config.num_gpu_blocks_override
    chunk = config.scheduler_config.max_num_batched_tokens
    max_model_len = config.model_config.max_model_len
    if config.model_config.original_max_model_len == -1:
        max_model_len = fit_length(
            info.specs,
            free_bytes,
            stages=info.stages,
            longest=max_model_len,
            num_blocks=num_blocks,
            max_num_batched_tokens=chunk,
        )
    layout = place(
        info.specs,
        free_bytes,
        stages=info.stages,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=chunk,
    )
    return layout, max_model_len
