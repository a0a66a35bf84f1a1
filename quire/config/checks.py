"""Steps of resolve.py that only check: variables without effect are reported, impossible options refused (of memory
nodes, of traces, of media, of encoder-decoder models).

In: the names of variables that are set. Out: at most two warnings, or an error (fail_on_environ_validation) for unknown
names. Must not know: values; base/env.py reads variables.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from quire.base import env
from quire.base.log import logger, once
from quire.base.unread import sort_names
from quire.checkpoint.media import prunes_video
from quire.config.engine import EngineConfig
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError

log = logger(__name__)
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp")
_CPU_LIST = re.compile(r"all|[+!]?\d+(-\d+)?(,\d+(-\d+)?)*")  # as numactl takes it


def check_environment(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Variables without effect are logged with the reason; unknown ones are warned about or refused."""
    known, unknown = sort_names()
    if unknown and config.fail_on_environ_validation:
        raise ConfigError(
            f"environment variables that Quire does not know are set: {', '.join(unknown)} "
            "(fail_on_environ_validation makes that an error)",
            param="fail_on_environ_validation",
        )
    if known:
        notes = "; ".join(f"{', '.join(names)} ({why})" for why, names in _by_reason(known).items())
        once(log, logging.WARNING, "Environment variables that have no effect: %s", notes)
    if unknown:
        once(log, logging.WARNING, "Environment variables that Quire does not know: %s", _with_hints(unknown))
    return config


def _by_reason(known: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, why in known.items():
        grouped.setdefault(why, []).append(name)
    return grouped


def _with_hints(unknown: list[str]) -> str:
    """Each with the name that was probably meant."""
    known = [spelling for variable in env.ALL.values() for spelling in variable.spellings]
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in unknown)
    return ", ".join(f"{name} (did you mean {close[0]}?)" if close else name for name, close in near)


def check_memory_nodes(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """numa_bind_nodes and numa_bind_cpus have no effect here, but what vLLM refuses is a mistake here too."""
    parallel = config.parallel_config
    nodes, cpus = parallel.numa_bind_nodes, parallel.numa_bind_cpus
    for name, values in (("numa_bind_nodes", nodes), ("numa_bind_cpus", cpus)):
        if values is None:
            continue
        if not parallel.numa_bind:
            raise ConfigError(f"{name}={list(values)} needs numa_bind", param=name, value=values)
        if not values:
            raise ConfigError(f"{name} is empty: name one for each device, or leave it out", param=name, value=values)
    if wrong := [node for node in nodes or () if node < 0]:
        raise ConfigError(
            f"numa_bind_nodes has {wrong[0]}: nodes are counted from 0", param="numa_bind_nodes", value=nodes
        )
    if wrong_cpus := [entry for entry in cpus or () if not _is_cpu_list(entry)]:
        raise ConfigError(
            f"numa_bind_cpus has {wrong_cpus[0]!r}: each entry is a list of CPUs as numactl takes it, such as 0-3,8, "
            "with ascending ranges",
            param="numa_bind_cpus",
            value=cpus,
        )
    return config


def _is_cpu_list(entry: str) -> bool:
    if _CPU_LIST.fullmatch(entry) is None:
        return False
    ranges = (map(int, part.split("-")) for part in entry.lstrip("+!").split(",") if "-" in part)
    return all(first <= last for first, last in ranges)


def check_traces(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """An endpoint needs OpenTelemetry; details need an endpoint."""
    observe = config.observability_config
    endpoint, details = observe.otlp_traces_endpoint, observe.collect_detailed_traces
    if details and endpoint is None:
        raise ConfigError(
            f"collect_detailed_traces={list(details)} needs otlp_traces_endpoint: the times are part of traces",
            param="collect_detailed_traces",
            value=details,
        )
    if endpoint is None:
        return config
    for package in _PACKAGES:
        if not _is_installed(package):
            raise MissingExtraError(f"otlp_traces_endpoint={endpoint!r}", "otel", package)
    if urlsplit(endpoint).scheme not in ("http", "https", "grpc") or not urlsplit(endpoint).netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4317, got {endpoint!r}",
            param="otlp_traces_endpoint",
            value=endpoint,
        )
    if details and {"model", "all"} & set(details) and config.device_config.device == "cuda":
        raise NotBuiltError(
            f"collect_detailed_traces={list(details)}: 'model' is measured on CPU only in this version (a GPU runs "
            "its forward pass asynchronously); use 'worker' for the time of complete steps",
            param="collect_detailed_traces",
        )
    return config


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_media(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """NotBuiltError for options of media that this model's family does not follow."""
    model, options = config.model_config, config.model_config.multimodal_config
    rate = None if options is None else options.video_pruning_rate
    if rate and "video" in model.facts.modalities and not prunes_video(model.hf_config):
        raise NotBuiltError(
            f"video_pruning_rate={rate} is not built for {model.architecture}: vectors are left out of videos of "
            "Qwen2-VL and Qwen2.5-VL only",
            param="video_pruning_rate",
        )
    return config


def check_encoder_decoder(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """NotBuiltError for options of which these models can make no use yet."""
    model, parallel, media = config.model_config, config.parallel_config, config.model_config.multimodal_config
    if not model.is_encoder_decoder:
        return config
    refused: dict[str, Any] = {
        "runner": model.runner if model.is_pooling else None,
        "pipeline_parallel_size": parallel.pipeline_parallel_size if parallel.pipeline_parallel_size > 1 else None,
        "enable_lora": config.enable_lora or None,
        "speculative_config": None if config.speculative_config is None else "given",
        "enable_prompt_embeds": model.enable_prompt_embeds or None,
        "language_model_only": None if media is None else media.language_model_only or None,
        "model_impl": model.model_impl if model.model_impl == "transformers" or model.model_class_overrides else None,
    }
    for name, value in refused.items():
        if value is not None:
            raise NotBuiltError(
                f"{model.architecture} is an encoder-decoder model, for which {name}={value!r} is not built: these run "
                "with Quire's own code, on one stage",
                param=name,
            )
    return config
