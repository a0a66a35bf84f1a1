"""The raw configuration of a model as the mapping of a config.json, whatever format it was stored in.

In: a path, and the user's hf_overrides. Out: a plain dict, which facts.py and the model declarations read.
Must not know: what a key means.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any

from quire.base.gguf import GGUFError, shared
from quire.base.log import logger
from quire.checkpoint import mistral_config
from quire.checkpoint.mistral_config import CONFIG_FILE
from quire.checkpoint.source import locate, read_json
from quire.schema.errors import CheckpointError, ConfigError

log = logger(__name__)


def read_raw(path: str, form: str) -> dict[str, Any]:
    """The configuration of a folder or a GGUF file; `form` is auto, hf or mistral."""
    if path.endswith(".gguf"):
        try:
            from quire.checkpoint.gguf_config import config_of  # lazy

            config: dict[str, Any] = config_of(shared(path))
        except GGUFError as wrong:
            raise CheckpointError(str(wrong)) from None
        return config
    if is_mistral(path, form):
        return mistral_config.config_of(read_json(path, CONFIG_FILE), path)
    return read_json(path, "config.json")


def read_elsewhere(
    source: str, revision: str | None, download_dir: str | None, token: bool | str | None
) -> dict[str, Any]:
    """The config.json of another folder or hub id, or a JSON file by its path."""
    path = os.path.expanduser(source)
    if path.endswith(".json") and os.path.isfile(path):
        return read_json(*os.path.split(path))
    located = locate(path, revision, download_dir, token, weights=False, option="hf_config_path")
    return read_json(located.path, "config.json")


def is_mistral(path: str, form: str) -> bool:
    """Whether a folder is read in Mistral's native format: as requested, else if it has no other."""
    if form != "auto":
        return form == "mistral"
    there = [os.path.exists(os.path.join(path, name)) for name in ("config.json", CONFIG_FILE)]
    return there == [False, True]


def apply_overrides(raw: dict[str, Any], patch: Any) -> dict[str, Any]:
    """Merge a mapping into the configuration, level by level, or call a function that returns the new one."""
    if not patch:
        return raw
    if callable(patch):
        changed = patch(RawConfig(copy.deepcopy(raw)))
        if not isinstance(changed, Mapping):
            raise ConfigError(
                f"the hf_overrides callable returned {type(changed).__name__}; it must return the configuration",
                param="hf_overrides",
            )
        log.info("hf_overrides: the configuration was changed by %s", patch)
        return {str(key): _plain(value) for key, value in changed.items()}
    log.info("hf_overrides: %s", ", ".join(f"{key}={value!r}" for key, value in patch.items()))
    return _merged(raw, patch)


class RawConfig(dict[str, Any]):
    """A configuration whose keys are attributes too, as hf_overrides functions written for vLLM expect."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}")
        value = self[name]
        if isinstance(value, dict) and not isinstance(value, RawConfig):
            value = self[name] = RawConfig(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return out
