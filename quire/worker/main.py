"""The worker's composition root: the only file of the tensor side that knows the concrete loader, model and backends.

In: a resolved EngineConfig. Out: a Worker, not loaded yet. An executor comes here through early.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quire.attention.select import select_backend
from quire.base import env, registry
from quire.base.clock import Laps
from quire.base.log import logger
from quire.base.plugins import call_plugins
from quire.loader.load import cache_scales, make_model, reload_weights, update_config
from quire.ops.cpu.forms import register
from quire.ops.op import Kernels
from quire.schema.errors import ConfigError, NotBuiltError
from quire.worker.threads import bind, num_threads
from quire.worker.worker import Job, Worker, WorkerParts

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.running import ParallelConfig
    from quire.models.build import Model
    from quire.quant.shard import ContextRanks
    from quire.worker.adapters import WorkerAdapters
    from quire.worker.early import Early
    from quire.worker.media import MediaEncoder

_log = logger(__name__)


def record(run: Callable[[], None], tell: Callable[[Job], None] | None) -> list[Job]:
    """The kernels that this would launch, as jobs for a compiler; none is launched."""
    from quire.ops.triton.register import record as record_  # lazy

    jobs: list[Job] = record_(run, tell)
    return jobs


def watch() -> None:
    """From now on every kernel that is compiled is worth a warning."""
    from quire.ops.triton.launch import watch as watch_  # lazy

    watch_()


def make_adapters(model: Model, config: EngineConfig, kernels: Kernels) -> WorkerAdapters | None:
    """Slots for adapters in every layer of the model; None where the configuration has none."""
    lora = config.lora_config
    if lora is None:
        return None
    from quire.worker.lora import give_slots  # lazy

    dtype = getattr(torch, config.model_config.dtype if lora.lora_dtype == "auto" else lora.lora_dtype)
    made: WorkerAdapters = give_slots(model, lora, dtype, kernels)
    return made


def make_encoder(config: EngineConfig, kernels: Kernels) -> MediaEncoder | None:
    """Of a model that takes media, or None where its requests bring vectors at most."""
    if not (config.model_config.takes_encoder or config.model_config.takes_media_embeds):
        return None
    from quire.loader.media import make_encoder as make  # lazy

    made: MediaEncoder | None = make(config, kernels)
    return made


PARTS = WorkerParts(
    make_model, reload_weights, update_config, select_backend, record, watch, cache_scales, make_adapters, make_encoder
)


def build_worker(
    config: EngineConfig,
    laps: Laps | None = None,
    early: Early | None = None,
    *,
    rank: int = 0,
    num_workers: int = 1,
    meeting: str = "",
) -> Worker:
    call_plugins()
    device, laps = torch.device(config.device_config.device), laps or Laps()
    parallel = config.parallel_config
    # among the workers of all engines of this machine
    here = num_workers // parallel.nnodes
    place, num_places = parallel.place_here * here + rank % here, parallel.num_engines_here * here
    if device.type == "cuda":
        with laps.inside("device"):
            device = set_up_gpu(laps, place, num_places, config.cache_config.kv_cache_memory_bytes)
    elif device.type != "cpu":
        raise NotBuiltError(f"device {str(device)!r} is not built; this version runs on cpu and cuda", param="device")
    threads = set_threads(place, num_places)
    if device.type == "cpu":
        register(threads)
    made = worker_class(config.parallel_config.worker_extension_cls)
    if num_workers == 1 and not parallel.experts_meeting and not env.JOIN_ALONE.get():
        return made(config, device, PARTS, laps, early)
    from quire.worker.ranks import join, join_alone, join_engines  # lazy

    if num_workers == 1 and not parallel.experts_meeting:
        joined = join_alone(device)
    elif parallel.experts_meeting:
        engine = parallel.data_parallel_rank, parallel.data_parallel_size
        stages = parallel.pipeline_parallel_size
        joined = join_engines(rank, num_workers, *engine, parallel.experts_meeting, device, stages)
    else:
        joined = join(rank, num_workers, meeting, device, parallel.pipeline_parallel_size)
    placement = parallel.expert_placement_strategy if parallel.enable_expert_parallel else ""
    moves = joined.broadcast if parallel.enable_eplb else None
    redundant = parallel.eplb_config.num_redundant_experts
    group = replace(
        joined.group, placement=placement, redundant=redundant, broadcast=moves, context=_context_of(parallel)
    )
    return made(config, device, PARTS, laps, early, group, joined.link, joined.talk)


def _context_of(parallel: ParallelConfig) -> ContextRanks | None:
    """The ranks with which this one divides contexts, once all have joined."""
    if parallel.decode_context_parallel_size == 1:
        return None
    from quire.worker.context import join_context  # lazy

    joined: ContextRanks = join_context(
        parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size,
        by_exchange=parallel.dcp_comm_backend == "a2a",
    )
    return joined


def set_up_gpu(laps: Laps, rank: int = 0, num_workers: int = 1, kv_bytes: int | None = None) -> torch.device:
    """Start CUDA and attach the kernels. Where either is missing, one clear error."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device cuda: torch {torch.__version__} finds no usable GPU; check the driver and CUDA_VISIBLE_DEVICES, "
            "install a CUDA build of torch, or set device=cpu",
            param="device",
            value="cuda",
        )
    if num_workers > 1:
        from quire.worker.ranks import gpu_of  # lazy

        torch.cuda.set_device(gpu_of(rank, num_workers, kv_bytes))
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.init()
    laps.mark("cuda")
    try:
        from quire.ops.triton.register import compiled  # lazy

        compiled()
        from quire.ops.triton.launch import unwatch  # lazy

        unwatch()
    except ModuleNotFoundError as wrong:
        raise ConfigError(
            f"device cuda needs the package {wrong.name!r}, which comes with CUDA builds of torch: pip install it, or "
            "set device=cpu",
            param="device",
            value="cuda",
        ) from None
    laps.mark("kernels")
    _log.info("GPU worker: %s", torch.cuda.get_device_name(device))
    return device


def worker_class(extension: str) -> type[Worker]:
    """Worker, with the methods of an extension class mixed in. An extension may add, not replace."""
    if not extension:
        return Worker
    try:
        added = registry.load(extension)
    except ImportError as wrong:
        raise ConfigError(
            f"worker_extension_cls {extension!r} cannot be loaded: {wrong}", param="worker_extension_cls"
        ) from wrong
    if not isinstance(added, type):
        raise ConfigError(f"worker_extension_cls {extension!r} is not a class", param="worker_extension_cls")
    clash = sorted(name for name in vars(added) if not name.startswith("__") and name in dir(Worker))
    if clash:
        raise ConfigError(
            f"worker_extension_cls {extension!r} defines {', '.join(clash)}, which the worker already has",
            param="worker_extension_cls",
        )
    return type(f"WorkerWith{added.__name__}", (Worker, added), {})


def set_threads(rank: int = 0, num_workers: int = 1) -> int:
    bind(rank, num_workers)  # before any thread is started, and before processors are counted
    threads = num_threads(num_workers=num_workers)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    _log.info("CPU threads: %d", threads)
    return threads
