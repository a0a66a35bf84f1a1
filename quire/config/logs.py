"""What the options say about logging, applied to this process: a least level, a dictConfig file, or its mapping.

In: LoggingConfig. base/log.py has what holds without them. Must not know: who logs what.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from quire.base import env
from quire.base.log import logger
from quire.base.registry import load
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.extras import LoggingConfig


def apply_logging(options: LoggingConfig) -> None:
    """Every process of an engine or a server does this when it starts."""
    mapping = options.logging_config
    path = options.log_config_file or env.LOGGING_CONFIG_PATH.get()
    if mapping is None and path:
        mapping = _read(path)
    if mapping is not None:
        try:
            load("logging.config:dictConfig")({"disable_existing_loggers": False, "version": 1, **mapping})
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as wrong:
            cause = f"{wrong}: {wrong.__cause__}" if wrong.__cause__ else str(wrong)
            raise ConfigError(f"the logging configuration cannot be used: {cause}", param="log_config_file") from None
    if options.log_level is not None:
        logger("quire").setLevel(logging.getLevelNamesMapping()[options.log_level])


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as wrong:
        raise ConfigError(
            f"log_config_file={path!r} cannot be read as JSON: {wrong}", param="log_config_file"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"log_config_file={path!r} must hold a mapping (dictConfig)", param="log_config_file")
    return found
