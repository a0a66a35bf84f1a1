"""The raw configuration of a model: the mapping of its config.json, in whichever of the known forms it was written.

In: a path, and the user's patches (hf_overrides). Out: a plain dict, which facts.py and the declarations of models
read. Must not know: what a key means.
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
    """Of a folder or a GGUF file; `form` is auto, hf or mistral."""
    if path.endswith(".gguf"):
        try:
            from quire.checkpoint.gguf_config import config_of  # lazy

            found: dict[str, Any] = config_of(shared(path))
        except GGUFError as wrong:
            raise CheckpointError(str(wrong)) from None
        return found
    if is_mistral(path, form):
        return mistral_config.config_of(read_json(path, CONFIG_FILE), path)
    return read_json(path, "config.json")


def read_elsewhere(
    place: str, revision: str | None, download_dir: str | None, token: bool | str | None
) -> dict[str, Any]:
    """The config.json of another folder or hub id, or a JSON file by its path."""
    path = os.path.expanduser(place)
    if path.endswith(".json") and os.path.isfile(path):
        return read_json(*os.path.split(path))
    return read_json(locate(path, revision, download_dir, token, weights=False).path, "config.json")


def is_mistral(path: str, form: str) -> bool:
    """Whether a folder is read in Mistral's own form: as asked, else if it has no other."""
    if form != "auto":
        return form == "mistral"
    there = [os.path.exists(os.path.join(path, name)) for name in ("config.json", CONFIG_FILE)]
    return there == [False, True]


def apply_overrides(raw: dict[str, Any], patch: Any) -> dict[str, Any]:
    """A mapping is merged into the configuration, level by level; a callable returns the new one."""
    if not patch:
        return raw
    if callable(patch):
        changed = patch(RawConfig(copy.deepcopy(raw)))
        if not isinstance(changed, Mapping):
            raise ConfigError(
                f"the hf_overrides callable returned {type(changed).__name__}; it must return the configuration",
                param="hf_overrides",
            )
        log.info("hf_overrides: the configuration went through %s", patch)
        return {str(key): _plain(value) for key, value in changed.items()}
    log.info("hf_overrides: %s", ", ".join(f"{key}={value!r}" for key, value in patch.items()))
    return _merged(raw, patch)


class RawConfig(dict[str, Any]):
    """A configuration whose keys can also be read and set as attributes, as patches written for vLLM do."""

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
