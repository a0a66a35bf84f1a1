"""Which steps replay a CUDA graph, and decode steps of which sizes: two steps of resolve.py.

In: the options cudagraph_mode, capture sizes, enforce_eager and the optimization level. Out: final values. FULL
captures steps with prompts too, FULL_DECODE_ONLY steps in which every request computes one token. No model is compiled,
so there are no pieces to capture: what asks for them gets whole steps.
"""

from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.config.engine import EngineConfig, replace
from quire.schema.errors import ConfigError

log = logger(__name__)
LARGEST = 1024  # captured batch, unless a larger one is asked for


def choose_graphs(given: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
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
    given = config.compilation_config.cudagraph_mode
    if config.device_config.device == "cpu":
        if given not in (None, "NONE"):
            log.info("cudagraph_mode: NONE (a CPU has no graphs; %s was asked for)", given)
        return "NONE"
    if config.model_config.enforce_eager:
        log.info("cudagraph_mode: NONE (enforce_eager)")
        return "NONE"
    if given is None:
        return "FULL" if config.optimization_level > 0 else "NONE"
    if given == "PIECEWISE":
        log.warning("cudagraph_mode: NONE (PIECEWISE needs a compiled model; FULL captures whole steps)")
        return "NONE"
    if given == "FULL_AND_PIECEWISE":
        log.info("cudagraph_mode: FULL (%s: steps with prompts are captured whole)", given)
        return "FULL"
    return given


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    compilation, scheduler = config.compilation_config, config.scheduler_config
    budget, largest = scheduler.max_num_batched_tokens, compilation.max_cudagraph_capture_size
    given = compilation.cudagraph_capture_sizes
    if given is None:
        most = min(largest or min(2 * scheduler.max_num_seqs, LARGEST), budget)
        sizes = default_sizes(most, budget)
        if largest is not None and sizes[-1] != largest:
            log.warning(
                "max_cudagraph_capture_size: %d (the largest size that is captured up to %d)", sizes[-1], largest
            )
        return sizes
    if not given or min(given) < 1:
        raise ConfigError(
            f"cudagraph_capture_sizes must name at least one size, each at least 1; got {list(given)}",
            param="cudagraph_capture_sizes",
        )
    kept = tuple(sorted({size for size in given if size <= budget}))
    if len(kept) < len(set(given)):
        log.warning("cudagraph_capture_sizes: those above max_num_batched_tokens=%d are dropped", budget)
    if not kept:
        raise ConfigError(
            f"every one of cudagraph_capture_sizes {list(given)} is above max_num_batched_tokens={budget}",
            param="cudagraph_capture_sizes",
        )
    if largest is not None and largest != kept[-1]:
        raise ConfigError(
            f"max_cudagraph_capture_size={largest} is not the largest of cudagraph_capture_sizes ({kept[-1]}); give "
            "one of them",
            param="max_cudagraph_capture_size",
        )
    return kept


def default_sizes(most: int, budget: int) -> tuple[int, ...]:
    """1, 2, 4, every 8 below 256, every 16 below 512, every 32 up to `most`; and the token budget if it is within."""
    whole = (budget,) if budget <= most else ()
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, most + 1, 32), *whole]
    return tuple(sorted({size for size in steps if size <= most}))
