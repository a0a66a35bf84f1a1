"""What the environment says that nobody here will hear, told once at the start of an engine.

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


def check_environment(asked: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Variables without effect are named with the reason; unknown ones are warned about or refused."""
    known, nobodys = sort_names()
    if nobodys and config.fail_on_environ_validation:
        raise ConfigError(
            f"environment variables that Quire does not know are set: {', '.join(nobodys)} "
            "(fail_on_environ_validation makes that an error)",
            param="fail_on_environ_validation",
        )
    if known:
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in _by_reason(known).items())
        once(log, logging.WARNING, "Environment variables that have no effect here: %s", told)
    if nobodys:
        once(log, logging.WARNING, "Environment variables that Quire does not know: %s", _with_hints(nobodys))
    return config


def _by_reason(known: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in known.items():
        found.setdefault(why, []).append(name)
    return found


def _with_hints(nobodys: list[str]) -> str:
    """Each with the name that was meant, most likely."""
    known = [spelling for variable in env.ALL.values() for spelling in variable.spellings]
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in nobodys)
    return ", ".join(f"{name} (did you mean {found[0]}?)" if found else name for name, found in near)
