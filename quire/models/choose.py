"""Which code runs a model: one of Quire's declarations, a registered one, or a transformers class.

In: the raw config.json, model_impl, and the classes registered for its architectures. Out: a CodeChoice. Loads nothing
heavy: the caller imports transformers, and only if it is needed. Must not know: files, weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from quire.base.log import logger
from quire.config.local import object_of
from quire.models.build import architecture_name
from quire.models.zoo import ZOO
from quire.schema.errors import ConfigError, MissingExtraError, some

_log = logger(__name__)
OLDEST = 5  # the first version of transformers with the caches and masks we use


class CodeChoice(NamedTuple):
    is_foreign: bool
    registered: type | None = None  # a registered class; None: the configuration names it


def choose_code(raw: Mapping[str, Any], impl: str, classes: Mapping[str, str]) -> CodeChoice:
    """`classes`: architecture -> name of the object registered for it (config/local.py)."""
    names = list(raw.get("architectures") or ())
    for name in (one for one in names if one in classes):
        registration = _load(name, classes[name])
        if isinstance(registration, type) and issubclass(registration, nn.Module):
            return _foreign(registration, f"{name} is a registered class")
        if impl != "transformers":
            ZOO.register(name, registration)
            _log.info("%s: the registered declaration %s", name, classes[name])
            return CodeChoice(False)
    if impl == "transformers":
        return _foreign(None, "model_impl='transformers'")
    if impl == "quire" or any(name in ZOO for name in names):
        architecture_name(raw)  # a clear error if nothing is declared
        return CodeChoice(False)
    return _foreign(None, f"no declaration for {some(names) or 'this model'}")


def _foreign(registered: type | None, why: str) -> CodeChoice:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"running a model through transformers' code ({why})", "transformers", "transformers")
    have = importlib.metadata.version("transformers")
    if int(have.partition(".")[0]) < OLDEST:
        raise ConfigError(
            f"running a model through transformers' code ({why}) needs transformers {OLDEST}, and {have} is installed",
            param="model_impl",
        )
    _log.info("model code: transformers' (%s)", why)
    return CodeChoice(True, registered)


def _load(name: str, path: str) -> Any:
    try:
        loaded = object_of(path)
    except (ImportError, AttributeError) as wrong:
        raise ConfigError(f"{name} was registered as {path!r}, which cannot be loaded: {wrong}", param=name) from wrong
    if not callable(loaded):
        raise ConfigError(f"{name} was registered as {path!r}, which is neither a class nor a function", param=name)
    return loaded
