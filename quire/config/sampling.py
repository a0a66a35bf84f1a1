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
from quire.schema.errors import ConfigError, InputError
from quire.schema.params import SamplingParams

log = logger(__name__)

HONOURED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_FILE = "generation_config.json"
_OPTION = "override_generation_config"


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
        located = locate(
            source, model.revision, files.download_dir, model.hf_token, weights=False, option="generation_config"
        )
        values = read_json(located.path, _FILE)
    ours = _overrides(model.override_generation_config)
    theirs = {key: values[key] for key in HONOURED if key not in ours and _is_number(_FILE, key, values.get(key))}
    theirs = {key: value for key, value in theirs.items() if _is_in_range(source, key, value)}
    ours = {key: value for key, value in ours.items() if value is not None}
    _say(source, theirs, ours)
    sampling = theirs | ours
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    ends = token_ids(beside.get("eos_token_id")) or model.facts.eos_token_ids
    facts = with_starts(model.facts, beside) if model.is_encoder_decoder else model.facts
    return replace(config, model_config=replace(model, default_sampling=sampling, eos_token_ids=ends, facts=facts))


def _overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked as a request's are; None: no default."""
    for key, value in values.items():
        if key not in HONOURED:
            raise ConfigError(f"{_OPTION} has {key!r}; allowed are {', '.join(HONOURED)}", param=_OPTION)
        if _is_number(_OPTION, key, value):
            try:
                _check_range(key, value)
            except InputError as wrong:
                raise ConfigError(f"{_OPTION} says {key}={value}: {wrong}", param=_OPTION, value=value) from None
    return dict(values)


def _is_in_range(source: str, key: str, value: Any) -> bool:
    """A model's own value that requests could not have is no default."""
    try:
        _check_range(key, value)
    except InputError as wrong:
        log.warning("%s of generation_config=%r is ignored: %s", key, source, wrong)
        return False
    return True


def _check_range(key: str, value: Any) -> None:
    SamplingParams(**{"max_tokens" if key == "max_new_tokens" else key: value})


def _say(source: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    where = "the model" if source == "auto" else repr(source)
    parts = ((theirs, f"from {where}; generation_config='vllm' switches it off"), (ours, f"from {_OPTION}"))
    shown = [f"{', '.join(f'{key}={value}' for key, value in part.items())} ({note})" for part, note in parts if part]
    if shown:
        log.info("default sampling: %s", ", ".join(shown))


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
