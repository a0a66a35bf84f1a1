"""Applies the logging options to this process: the level, the format, a dictConfig file or mapping.

Configurations written for vLLM work: settings of the logger `vllm` apply to `quire`, and if only the root logger is
configured, Quire's records go there. In: LoggingConfig. base/log.py has the defaults.
Must not know: who logs what.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from quire.base import env
from quire.base.log import hand_up, logger, write_json
from quire.base.registry import load
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.extras import LoggingConfig


def apply_logging(options: LoggingConfig) -> None:
    """Called once in every process of an engine or a server."""
    mapping = options.logging_config
    path = options.log_config_file or env.LOGGING_CONFIG_PATH.get()
    if mapping is None and path:
        mapping = _read(path)
    if mapping is not None:
        try:
            load("logging.config:dictConfig")(for_quire(mapping))
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as wrong:
            cause = f"{wrong}: {wrong.__cause__}" if wrong.__cause__ else str(wrong)
            raise ConfigError(f"the logging configuration cannot be used: {cause}", param="log_config_file") from None
        if logs_at_root(mapping):
            hand_up()
    if options.log_format == "json":
        write_json()
    if options.log_level is not None:
        logger("quire").setLevel(logging.getLevelNamesMapping()[options.log_level])


def for_quire(mapping: dict[str, Any]) -> dict[str, Any]:
    """`vllm` and the loggers below it are `quire`'s, unless the configuration names those too."""
    full = {"disable_existing_loggers": False, "version": 1, **mapping}
    named = full.get("loggers")
    if isinstance(named, dict):
        ours = {f"quire{name[4:]}": settings for name, settings in named.items() if f"{name}.".startswith("vllm.")}
        full["loggers"] = {**ours, **named}
    return full


def logs_at_root(mapping: dict[str, Any]) -> bool:
    """The root logger has handlers, and neither `quire` nor `vllm` is configured."""
    named = mapping.get("loggers") or {}
    root = mapping.get("root") or named.get("") or named.get("root") or {}
    return bool(root.get("handlers")) and not {"quire", "vllm"} & set(named)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as wrong:
        raise ConfigError(
            f"log_config_file={path!r} cannot be read as JSON: {wrong}", param="log_config_file"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"log_config_file={path!r} must hold a mapping (dictConfig)", param="log_config_file")
    return content
