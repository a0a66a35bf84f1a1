"""What a GPU worker's start can do while torch is still being imported; and the way to the worker itself.

In: a resolved EngineConfig. An executor begins here, because everything else of the tensor side imports torch, which
takes half of a start. Meanwhile a thread starts CUDA, another reads Triton's compiler (it names its cache files by a
hash of itself), and where no kernels were kept for this model, processes that will compile them get ready.
Must not import torch or triton itself.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.base import env, registry
from quire.base.clock import Laps
from quire.base.collector import no_collections
from quire.base.machine import find_gpu
from quire.ops.triton.warm import Compilers, Manifest, cache_dir, num_children

if TYPE_CHECKING:
    from quire.config import EngineConfig

_DRIVER = "libcuda.so.1"


def build_worker(config: EngineConfig, *, rank: int = 0, num_workers: int = 1, meeting: str = "") -> Any:
    """A worker, not loaded yet. `meeting`: a URL at which several find each other."""
    if num_workers > 1:  # in a process of its own
        from quire.config.logs import apply_logging  # lazy

        apply_logging(config.logging_config)
    laps = Laps()
    with laps.inside("device"):
        early = Early(config, rank, num_workers) if config.device_config.device == "cuda" else None
        if early is None:
            env.let_idle_threads_sleep()
        with no_collections():
            from quire.worker.main import build_worker as build_worker_  # lazy

            build = build_worker_
        laps.mark("import")
    return build(config, laps, early, rank=rank, num_workers=num_workers, meeting=meeting)


class Early:
    def __init__(self, config: EngineConfig, rank: int = 0, num_workers: int = 1) -> None:
        self.folder = cache_dir()
        self.manifest = Manifest(about(config, rank, num_workers), self.folder)
        self.compilers: Compilers | None = None
        self._key: Future[str] = Future()
        here = num_workers // config.parallel_config.nnodes
        device = config.parallel_config.place_here * here + rank % here
        for work in (partial(start_cuda, device), self._read_triton):
            threading.Thread(target=work, name="early start", daemon=True).start()
        if not self.manifest.current and (count := num_children() // num_workers) > 0:
            self.compilers = Compilers(count, self.folder, self._key)
            self.compilers.submit([{"driver": True}, *self.manifest.jobs])

    def close(self) -> None:
        """End the processes that compile, once a load is over; one that failed may still have some."""
        if self.compilers is not None:
            self.compilers.close()
            self.compilers = None

    def _read_triton(self) -> None:
        key = ""
        try:
            registry.load("triton:knobs").cache.dir = self.folder
            key = registry.load("triton.runtime.cache:triton_key")()
        except (ImportError, AttributeError, OSError):  # main.py says clearly what is missing
            pass
        finally:
            self._key.set_result(key)


def start_cuda(number: int = 0) -> None:
    """Make the device's context; torch finds it there. Whatever is wrong, torch will say in better words."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):
        pass


def about(config: EngineConfig, rank: int = 0, num_workers: int = 1) -> dict[str, Any]:
    """All that decides which kernels a worker will want. Each rank has a record of its own, so that all of them compile
    in the same start: a dry run has sums over ranks in it, which all must take part in."""
    model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
    gpu, lora, stages = find_gpu(), config.lora_config, parallel.pipeline_parallel_size
    contexts = [parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size]
    engines, copies = parallel.data_parallel_size, parallel.eplb_config.num_redundant_experts
    divides = parallel.enable_expert_parallel and max(num_workers, engines) > 1
    return {
        "gpu": "" if gpu is None else gpu.name,
        "model": model.hf_config,
        "dtype": model.dtype,
        "weights": [model.weight_form, model.head_form, model.quantization],
        **({"file": model.path} if config.load_config.load_format == "gguf" else {}),  # its types of blocks
        "kv_dtype": config.cache_config.cache_dtype,
        "block_size": config.cache_config.block_size,
        "length": model.max_model_len,
        "rows": scheduler.max_num_seqs,
        "tokens": scheduler.max_num_batched_tokens,
        "graphs": config.compilation_config.cudagraph_capture_sizes,
        "attention": config.attention_config.backend,
        "fixed": env.BATCH_INVARIANT.get(),
        **({} if lora is None else {"adapters": [lora.max_loras, lora.max_lora_rank, lora.lora_dtype]}),
        **({"both_cut": True} if lora is not None and lora.fully_sharded_loras and num_workers > 1 else {}),
        **({"rank": rank, "ranks": num_workers} if num_workers > 1 else {}),
        **({"contexts": contexts} if contexts[0] > 1 else {}),
        **({"whole_experts": [engines, copies]} if divides else {}),
        **({"stages": stages, "layers": env.PP_LAYER_PARTITION.get()} if stages > 1 else {}),
    }
