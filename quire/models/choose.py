"""Whose code runs a model: a declaration of ours, one from outside, or a class of transformers' form.

In: the raw config.json, model_impl, and the classes registered for its architectures. Out: a Way. Loads nothing heavy:
transformers is reached by the caller, and only where it is needed. Must not know: files, weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from quire.base.log import logger
from quire.config.local import thing_of
from quire.models.build import architecture_name
from quire.models.zoo import ZOO
from quire.schema.errors import ConfigError, MissingExtraError, some

_log = logger(__name__)
OLDEST = 5  # the first version of transformers whose caches and masks have the form we use


class Way(NamedTuple):
    is_foreign: bool
    given: type | None = None  # a registered class; None: the configuration names it


def choose_way(raw: Mapping[str, Any], impl: str, classes: Mapping[str, str]) -> Way:
    """`classes`: architecture -> name of what was registered for it (config/local.py)."""
    names = list(raw.get("architectures") or ())
    for name in (one for one in names if one in classes):
        found = _load(name, classes[name])
        if isinstance(found, type) and issubclass(found, nn.Module):
            return _foreign(found, f"{name} was registered from outside")
        if impl != "transformers":
            ZOO.register(name, found)
            _log.info("%s: the declaration %s, registered from outside", name, classes[name])
            return Way(False)
    if impl == "transformers":
        return _foreign(None, "model_impl='transformers'")
    if impl == "quire" or any(name in ZOO for name in names):
        architecture_name(raw)  # a clear error where nothing is declared
        return Way(False)
    return _foreign(None, f"no declaration for {some(names) or 'this model'}")


def _foreign(given: type | None, why: str) -> Way:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"running a model through transformers' code ({why})", "transformers", "transformers")
    have = importlib.metadata.version("transformers")
    if int(have.partition(".")[0]) < OLDEST:
        raise ConfigError(
            f"running a model through transformers' code ({why}) needs transformers {OLDEST}, and {have} is installed",
            param="model_impl",
        )
    _log.info("model code: transformers' (%s)", why)
    return Way(True, given)


def _load(name: str, path: str) -> Any:
    try:
        found = thing_of(path)
    except (ImportError, AttributeError) as wrong:
        raise ConfigError(f"{name} was registered as {path!r}, which cannot be loaded: {wrong}", param=name) from wrong
    if not callable(found):
        raise ConfigError(f"{name} was registered as {path!r}, which is neither a class nor a function", param=name)
    return found
