"""Default sampling of a model: its generation_config.json, the user's overrides, and the end-of-text tokens.

In: an EngineConfig whose model was found. Out: the same with default_sampling and eos_token_ids.
"""

import os
from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.checkpoint import embedded
from quire.checkpoint.facts import token_ids, with_starts
from quire.checkpoint.source import locate, read_json
from quire.config.engine import EngineConfig, replace
from quire.schema.errors import ConfigError

log = logger(__name__)

HONOURED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_FILE = "generation_config.json"


def choose_sampling(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Sampling values for requests that do not set them."""
    model = config.model_config
    beside = _read(model.path)
    source = model.generation_config
    if source == "auto":
        values = beside if requested.get("model") else embedded.SAMPLING
    elif source == "vllm":
        values = {}
    else:
        files = config.load_config
        located = locate(source, model.revision, files.download_dir, model.hf_token, weights=False)
        values = read_json(located.path, _FILE)
    sampling = {key: values[key] for key in HONOURED if _is_number(_FILE, key, values.get(key))}
    for key, value in model.override_generation_config.items():
        if key not in HONOURED:
            raise ConfigError(
                f"override_generation_config has {key!r}; allowed are {', '.join(HONOURED)}",
                param="override_generation_config",
            )
        if _is_number("override_generation_config", key, value):
            sampling[key] = value
        else:
            sampling.pop(key, None)
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    if sampling:
        shown = ", ".join(f"{key}={value}" for key, value in sampling.items())
        log.info("default sampling: %s (from the model; generation_config='vllm' switches it off)", shown)
    ends = token_ids(beside.get("eos_token_id")) or model.facts.eos_token_ids
    facts = with_starts(model.facts, beside) if model.is_encoder_decoder else model.facts
    return replace(config, model_config=replace(model, default_sampling=sampling, eos_token_ids=ends, facts=facts))


def _read(path: str) -> dict[str, Any]:
    """The file next to the weights, {} if there is none."""
    return read_json(path, _FILE) if os.path.isfile(os.path.join(path, _FILE)) else {}


def _is_number(where: str, key: str, value: Any) -> bool:
    if value is None:
        return False
    whole = key in ("top_k", "max_new_tokens")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(f"{where} says {key}={value!r}; expected a {'whole ' if whole else ''}number", param=key)
    return True
