"""Which steps replay a CUDA graph, and the decode batch sizes captured: a step of resolve.py.

In: the options cudagraph_mode, capture sizes, enforce_eager and the optimization level. Out: final values. FULL
captures steps with prefills too, FULL_DECODE_ONLY only steps in which every request computes one token. No model is
compiled, so piecewise graphs do not exist: piecewise modes are mapped to full ones.
"""

from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.config.engine import EngineConfig, replace
from quire.schema.errors import ConfigError

log = logger(__name__)
LARGEST = 1024  # captured batch, unless a larger one is requested


def choose_graphs(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """The mode, then the sizes; without graphs the list is empty and the largest size 0."""
    mode = _mode(config)
    changes: dict[str, Any] = {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": (),
        "max_cudagraph_capture_size": None,
    }
    if mode != "NONE":
        changes["cudagraph_capture_sizes"] = sizes = _sizes(config)
        changes["max_cudagraph_capture_size"] = sizes[-1]
    return replace(config, compilation_config=replace(config.compilation_config, **changes))


def _mode(config: EngineConfig) -> str:
    mode = config.compilation_config.cudagraph_mode
    if config.device_config.device == "cpu":
        if mode not in (None, "NONE"):
            log.info("cudagraph_mode: NONE (a CPU has no graphs; %s was requested)", mode)
        return "NONE"
    if config.model_config.enforce_eager:
        log.info("cudagraph_mode: NONE (enforce_eager)")
        return "NONE"
    if mode is None:
        return "FULL" if config.optimization_level > 0 else "NONE"
    if mode == "PIECEWISE":
        log.warning("cudagraph_mode: NONE (PIECEWISE needs a compiled model; FULL captures complete steps)")
        return "NONE"
    if mode == "FULL_AND_PIECEWISE":
        log.info("cudagraph_mode: FULL (%s: steps with prefills are captured completely)", mode)
        return "FULL"
    return mode


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    compilation, scheduler = config.compilation_config, config.scheduler_config
    budget, largest = scheduler.max_num_batched_tokens, compilation.max_cudagraph_capture_size
    requested = compilation.cudagraph_capture_sizes
    if requested is None:
        most = min(largest or min(2 * scheduler.max_num_seqs, LARGEST), budget)
        sizes = default_sizes(most, budget)
        if largest is not None and sizes[-1] != largest:
            log.warning("max_cudagraph_capture_size: %d (the largest captured size up to %d)", sizes[-1], largest)
        return sizes
    if not requested or min(requested) < 1:
        raise ConfigError(
            f"cudagraph_capture_sizes must name at least one size, each at least 1; got {list(requested)}",
            param="cudagraph_capture_sizes",
        )
    usable = tuple(sorted({size for size in requested if size <= budget}))
    if len(usable) < len(set(requested)):
        log.warning("cudagraph_capture_sizes: those above max_num_batched_tokens=%d are dropped", budget)
    if not usable:
        raise ConfigError(
            f"every one of cudagraph_capture_sizes {list(requested)} is above max_num_batched_tokens={budget}",
            param="cudagraph_capture_sizes",
        )
    if largest is not None and largest != usable[-1]:
        raise ConfigError(
            f"max_cudagraph_capture_size={largest} is not the largest of cudagraph_capture_sizes ({usable[-1]})",
            param="max_cudagraph_capture_size",
        )
    return usable


def default_sizes(most: int, budget: int) -> tuple[int, ...]:
    """1, 2, 4, every 8 below 256, every 16 below 512, every 32 up to `most`; and the token budget if it is within."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, most + 1, 32), budget]
    return tuple(sorted({size for size in sizes if size <= most}))
