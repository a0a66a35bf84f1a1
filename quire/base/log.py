"""Logging: one logger tree, `quire`, set up once, and messages that may be said once per process.

What a client sent may be part of a message, so control characters are escaped: it can neither make up a line nor paint
the terminal. A message has several lines only where its own words, before any argument is put in, have.

Level and stream come from base/env.py (QUIRE_LOGGING_LEVEL, QUIRE_LOGGING_STREAM; the VLLM_ spellings work too).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Hashable
from typing import Any

from quire.base import env

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
# C0, DEL, C1, the line ends of Unicode, and what turns the direction of writing
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_logged: set[Hashable] = set()
_HANDED_UP = "records go to the root logger"


class PlainLines(logging.Formatter):
    """A record of one line stays one line, whatever was put into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = _escape(record.message)
        record.message = text if "\n" in str(record.msg) else text.replace("\n", "\\n")
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _escape(super().formatException(ei))


class JsonLines(logging.Formatter):
    """A record as one line of JSON, in ASCII: nothing in it can end the line or paint a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name,
            "message": record.getMessage(), "process": record.process,
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)


def logger(name: str) -> logging.Logger:
    """The logger of a module; pass __name__."""
    _set_up()
    return logging.getLogger(name)


def once(log: logging.Logger, level: int, message: str, *args: Hashable) -> None:
    """Log this message with these arguments at most once in this process."""
    key = (log.name, level, message, args)
    if key not in _logged:
        _logged.add(key)
        log.log(level, message, *args)


def write_json() -> None:
    """From now on our own handlers do; those of a logging configuration stay as they are."""
    for handler in logging.getLogger("quire").handlers:
        if isinstance(handler.formatter, PlainLines):
            handler.setFormatter(JsonLines())


def hand_up() -> None:
    """Leave our records to the handlers of the root logger, for good."""
    root = logging.getLogger("quire")
    root.handlers.clear()
    root.propagate = True
    _logged.add(_HANDED_UP)


def _set_up() -> None:
    root = logging.getLogger("quire")
    if root.handlers or _HANDED_UP in _logged or not env.CONFIGURE_LOGGING.get():
        return
    stream = {"stdout": sys.stdout, "stderr": sys.stderr}[env.LOGGING_STREAM.get()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainLines(_FORMAT, datefmt="%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(env.LOGGING_LEVEL.get())
    root.propagate = False
