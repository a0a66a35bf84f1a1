"""What the engines of several machines must have in common to be replicas of each other, and where they do not.

In: resolved configurations, each on its own machine. Out: what one says of itself, as plain data for the other, and the
differences in words that name both values. Files may lie elsewhere on each machine, and memory, places and logs are
each one's own. Must not know: who compares, or what becomes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from quire.checkpoint.fingerprint import fingerprints
from quire.checkpoint.weight_files import find_sharded, find_weights, pattern_of
from quire.config.engine import EngineConfig
from quire.schema.errors import QuireError, some

# A name stands for all that begins with it.
_MODEL = (
    "model_config.hf_config", "model_config.runner", "model_config.convert", "model_config.pooler_config",
    "model_config.max_model_len", "model_config.max_logprobs", "model_config.logprobs_mode",
    "model_config.enable_prompt_embeds", "enable_lora", "lora_config",
)  # fmt: skip
_WEIGHTS = "model_config.weights"  # digests by file name; one file that is the model: by no name
_ENGINE = (
    _WEIGHTS, "model_config.dtype", "model_config.quantization", "model_config.seed",
    "model_config.disable_sliding_window", "model_config.model_impl", "model_config.logits_processors",
    "model_config.weight_form", "model_config.head_form", "device_config", "structured_outputs_config",
    "reasoning_config",
    "speculative_config.method", "speculative_config.num_speculative_tokens", "parallel_config.tensor_parallel_size",
    "parallel_config.pipeline_parallel_size", "parallel_config.decode_context_parallel_size",
    "parallel_config.enable_expert_parallel", "parallel_config.enable_eplb", "cache_config.block_size",
    "cache_config.cache_dtype", "cache_config.enable_prefix_caching", "cache_config.prefix_caching_hash_algo",
    "scheduler_config", "kv_events_config", "optimization_level",
)  # fmt: skip
_MOST_NAMED = 4
_LONGEST_VALUE = 80
_NOTHING = "not set"


def statement(config: EngineConfig) -> dict[str, Any]:
    """By dotted name."""
    stated = dict(_leaves("", msgspec.to_builtins(config)))
    stated[_WEIGHTS] = _weights(config)
    return {name: value for name, value in stated.items() if _is_below(name, (*_MODEL, *_ENGINE))}


def differences(here: Mapping[str, Any], there: Mapping[str, Any], *, model_only: bool = False) -> str:
    """In words; nothing if there are none. `model_only`: here is no engine, only who prepares requests for them."""
    compared = _MODEL if model_only else (*_MODEL, *_ENGINE)
    names = [name for name in sorted({*here, *there}) if _is_below(name, compared)]
    unequal = [name for name in names if _plain(here.get(name)) != _plain(there.get(name))]
    words = [_difference(name, here.get(name), there.get(name)) for name in unequal]
    more = [f"and {len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else []
    return "; ".join([*words[:_MOST_NAMED], *more])


def _weights(config: EngineConfig) -> dict[str, str]:
    """Of the files that the engines of this machine read. None where there are none: the engine says what it misses."""
    about, how, parallel = config.model_config, config.load_config, config.parallel_config
    if how.load_format == "dummy":
        return {}
    try:
        if how.load_format == "sharded_state":
            ranks = range(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
            pattern = pattern_of(how.model_loader_extra_config)
            digests = fingerprints(path for rank in ranks for path in find_sharded(about.path, rank, pattern).paths)
        else:
            digests = fingerprints(find_weights(about.path, how.load_format, how.ignore_patterns).paths)
            for name, folder in about.part_paths.items():
                part = fingerprints(find_weights(folder, how.load_format, how.ignore_patterns).paths)
                digests |= {f"{name}/{file}": digest for file, digest in part.items()}
    except (QuireError, OSError):
        return {}
    return dict(zip([""], digests.values(), strict=True)) if os.path.isfile(about.path) else digests


def _difference(name: str, here: Any, there: Any) -> str:
    if name == _WEIGHTS and isinstance(here, Mapping) and isinstance(there, Mapping):
        if here.keys() != there.keys():
            only = [some(sorted(map(str, one.keys() - other.keys()))) for one, other in ((there, here), (here, there))]
            return (
                f"other weight files are there than here: only there {only[0] or 'none'}, only here {only[1] or 'none'}"
            )
        other = some(sorted(str(file) for file in here if here[file] != there[file]))
        return f"the weights are not the same there and here: {other or 'the model file'} differs"
    return f"{name} is {_told(there)} there and {_told(here)} here"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), inner)


def _is_below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _plain(value: Any) -> Any:
    """What has crossed a wire is a list where it was a tuple."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _told(value: Any) -> str:
    text = _NOTHING if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
