"""Logging: one logger tree, `quire`, set up once, and messages that may be said once per process.

Level and stream come from base/env.py (QUIRE_LOGGING_LEVEL, QUIRE_LOGGING_STREAM; the VLLM_ spellings work too).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable

from quire.base import env

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_said: set[Hashable] = set()


def logger(name: str) -> logging.Logger:
    """The logger of a module; pass __name__."""
    _set_up()
    return logging.getLogger(name)


def once(log: logging.Logger, level: int, message: str, *args: Hashable) -> None:
    """Log this message with these arguments at most once in this process."""
    key = (log.name, level, message, args)
    if key not in _said:
        _said.add(key)
        log.log(level, message, *args)


def _set_up() -> None:
    root = logging.getLogger("quire")
    if root.handlers or not env.CONFIGURE_LOGGING.get():
        return
    stream = {"stdout": sys.stdout, "stderr": sys.stderr}[env.LOGGING_STREAM.get()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(env.LOGGING_LEVEL.get())
    root.propagate = False
