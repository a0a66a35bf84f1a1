"""Environment variables that have no effect here, reported once at the start of an engine.

In: the names of variables that are set. Out: at most two warnings, or an error (fail_on_environ_validation) for unknown
names. Must not know: values; reading variables is base/env.py's.
"""

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from quire.base import env
from quire.base.log import logger, once
from quire.base.unread import sort_names
from quire.config.engine import EngineConfig
from quire.schema.errors import ConfigError

log = logger(__name__)


def check_environment(given: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Variables without effect are named with the reason; unknown ones are warned about or refused."""
    known, unknown = sort_names()
    if unknown and config.fail_on_environ_validation:
        raise ConfigError(
            f"environment variables that Quire does not know are set: {', '.join(unknown)} "
            "(fail_on_environ_validation makes that an error)",
            param="fail_on_environ_validation",
        )
    if known:
        notes = "; ".join(f"{', '.join(names)} ({why})" for why, names in _by_reason(known).items())
        once(log, logging.WARNING, "Environment variables that have no effect here: %s", notes)
    if unknown:
        once(log, logging.WARNING, "Environment variables that Quire does not know: %s", _with_hints(unknown))
    return config


def _by_reason(known: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, why in known.items():
        grouped.setdefault(why, []).append(name)
    return grouped


def _with_hints(unknown: list[str]) -> str:
    """Each with the name that was most likely meant."""
    known = [spelling for variable in env.ALL.values() for spelling in variable.spellings]
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in unknown)
    return ", ".join(f"{name} (did you mean {close[0]}?)" if close else name for name, close in near)
