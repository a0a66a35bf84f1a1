"""Parts that a checkpoint may name instead of holding them: the language model and the audio encoder of Ultravox.

In: the raw configuration, the folder, and how another folder or hub id is found. Out: the configuration with those of
its parts in it, and the folders with weights of parts of which the checkpoint has no tensor. Must not know: hubs, what
becomes of a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.checkpoint.source import read_json, read_tensor_names
from quire.schema.errors import CheckpointError, InputError, ModelNotFoundError, NotBuiltError

TEXT, AUDIO = "text", "audio"
_LONGEST_NAME = 4096


class _NamedPart(NamedTuple):
    name: str
    id_key: str  # of the configuration: which checkpoint has it
    config_key: str
    prefix: str  # of the names of its tensors

    @property
    def adapters(self) -> str:
        return f"{self.name}_model_lora_config"


_PARTS = {
    "UltravoxModel": (
        _NamedPart(TEXT, "text_model_id", "text_config", "language_model."),
        _NamedPart(AUDIO, "audio_model_id", "audio_config", "audio_tower."),
    )
}


class LocatedParts(NamedTuple):
    raw: dict[str, Any]
    paths: dict[str, str]  # by name of a part


def find_parts(raw: dict[str, Any], path: str, find: Callable[[str], str]) -> LocatedParts:
    """`find`: from a folder's name or a hub id to a folder."""
    names = raw.get("architectures")
    known = [name for name in names if isinstance(name, str) and name in _PARTS] if isinstance(names, list) else []
    own = _PARTS[known[0]] if known else ()
    paths: dict[str, str] = {}
    for part in own:
        _refuse_adapters(raw, part)
        config, source = raw.get(part.config_key), raw.get(part.id_key)
        if config is not None and not isinstance(config, Mapping):
            raise CheckpointError(f"{part.config_key} must be a mapping, not {config!r:.60}", param=part.config_key)
        is_here = not source or holds(path, part.prefix)
        if config and is_here:
            continue
        if not isinstance(source, str) or not 0 < len(source) <= _LONGEST_NAME:
            raise CheckpointError(
                f"the model's configuration has neither {part.config_key} nor the name of a checkpoint in "
                f"{part.id_key} ({source!r:.60}): its {part.name} model is unknown",
                param=part.id_key,
            )
        folder = _find(part, source, find)
        raw = {**raw, part.config_key: _innermost(config or read_json(folder, "config.json"), part.config_key)}
        if not is_here:
            paths[part.name] = folder
    return LocatedParts(raw, paths)


def holds(path: str, prefix: str) -> bool:
    """Whether safetensors files of a folder have such tensors."""
    return any(name.startswith(prefix) for name in read_tensor_names(path))


def _find(part: _NamedPart, source: str, find: Callable[[str], str]) -> str:
    try:
        folder = find(source)
    except InputError as wrong:
        raise ModelNotFoundError(
            f"the checkpoint has no {part.name} model of its own and names {source!r:.200} ({part.id_key}): {wrong}. "
            f'hf_overrides={{"{part.id_key}": …}} names another folder',
            param="model",
            value=source,
        ) from None
    if not os.path.isdir(folder):
        raise NotBuiltError(
            f"{part.id_key} is {source!r:.200}, which is one file: a part is read from a folder", param="model"
        )
    return folder


def _innermost(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """That of the language model, where the named checkpoint takes media itself."""
    inner = config.get(key)
    return _innermost(inner, key) if isinstance(inner, Mapping) else config


def _refuse_adapters(raw: Mapping[str, Any], part: _NamedPart) -> None:
    adapters = raw.get(part.adapters)
    if isinstance(adapters, Mapping) and adapters.get("r"):
        raise NotBuiltError(
            f"{part.adapters} has rank {adapters['r']!r:.60}: adapters within the checkpoint are not built; merge them "
            "into the weights",
            param=part.adapters,
        )
