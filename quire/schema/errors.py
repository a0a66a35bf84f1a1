"""The one exception tree. Every error a user can cause names the value it saw and the limit it broke.

Owns: which errors exist, their HTTP status, and whether a caller may go on. Must not know: HTTP itself, or how
an error is rendered in a dialect. `status` is only a number the server reads.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quire.base.distribution import install


def some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def counted(number: int, noun: str, plural: str = "") -> str:
    """'1 line', '2 lines'."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


LONGEST = 2000  # characters of a message


def _readable(message: str) -> str:
    text = message.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 100]} … {text[-90:]}"


# Of one of several engines that have experts together: another one is gone, which may have its own reason.
PEERS_LOST = "did not come to a step of the engines that share experts"


class QuireError(Exception):
    """Anything Quire raises on purpose."""

    status = 500
    request_id = ""  # of the request that it is about, where it is about one of several

    def at(self, place: str) -> None:
        """Say which of several things it is about."""
        self.args = (_readable(f"{place}: {self}"), *self.args[1:])


class InputError(QuireError, ValueError):
    """The caller asked for something that cannot be; the engine is fine and takes the next request.

    A ValueError too, because programs written for the documented API catch that. What it tells of may be of any length
    and any characters; the message is not.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, value: object = None) -> None:
        super().__init__(_readable(message))
        self.param = param
        self.value = value


class ConfigError(InputError):
    """An option, or a combination of options, that cannot be served."""


class NotBuiltError(ConfigError, NotImplementedError):
    """An option whose feature this version does not have; refused by name, never ignored."""


class ModelNotFoundError(InputError):
    """A model argument that is no folder, no file, and cannot be fetched."""

    status = 404


class CheckpointError(InputError):
    """Model files that are missing, truncated, corrupt or do not fit the architecture."""


class OverloadedError(QuireError):
    """The queue is full; try again later."""

    status = 503
    retry_after = 1  # seconds; what a server tells the client to wait
    limit = ""  # the option that says how full the queue may be

    def __init__(self, message: str, *, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


class DeadlineError(QuireError, TimeoutError):
    """A request took longer than it was given; it was ended, and the engine goes on."""

    status = 504


class TooLargeError(InputError):
    """A request with more bytes than the server reads."""

    status = 413


class ShutdownError(QuireError):
    """The server is shutting down; what still ran was ended."""

    status = 503
    retry_after = 5


class EngineGenerateError(QuireError):
    """One request failed; the engine goes on."""


class RefusedRequestError(InputError, EngineGenerateError):
    """What AsyncLLM.generate cannot take. Both, because programs written for the documented API catch either."""


class EngineDeadError(QuireError):
    """The engine is gone; every request in flight failed with this, and later ones will too."""

    status = 503

    def __init__(self, reason: str = "the engine is not running") -> None:
        super().__init__(f"Quire's engine is dead: {reason}")
        self.reason = reason


class MissingExtraError(QuireError, ImportError):
    """A feature needs packages outside the core install."""

    def __init__(self, feature: str, extra: str, missing: str) -> None:
        super().__init__(f"{feature} needs the package '{missing}': run  {install(extra)}")
        self.extra = extra


# ---- which of several things it is about --------------------------------------------------------------------------

Item = TypeVar("Item")
Made = TypeVar("Made")


def make_each(name: str, items: Sequence[Item], make: Callable[[Item], Made]) -> list[Made]:
    """Of each item; an error names the one that it is about."""
    made = []
    for place, item in enumerate(items):
        try:
            made.append(make(item))
        except InputError as wrong:
            if len(items) > 1:
                wrong.at(f"{name}[{place}]")
            raise
    return made


def name_prompt(failed: QuireError, places: Mapping[str, int], total: int) -> None:
    """If it is about one of `total` requests, whose places have their ids."""
    if total > 1 and failed.request_id in places:
        failed.at(f"prompts[{places[failed.request_id]}]")


# ---- over a wire: an error is its kind and its message ------------------------------------------------------------


def kind_of(failed: BaseException) -> str:
    """The nearest class name that the other side can raise: of schema/errors.py, or a builtin."""
    for cls in type(failed).__mro__:
        if _class_of(cls.__name__) is cls and cls not in (Exception, BaseException):
            return cls.__name__
    return ""


def message_of(failed: BaseException) -> str:
    text = str(failed)
    known = kind_of(failed) == type(failed).__name__
    return text if known and text else f"{type(failed).__name__}: {text}" if text else type(failed).__name__


def rebuild_error(kind: str, message: str) -> Exception:
    """The same kind of exception with the same message, for the caller's side."""
    cls = _class_of(kind) or RuntimeError
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    if isinstance(error, InputError):
        error.param = error.value = None
    if isinstance(error, EngineDeadError):
        error.reason = message
    return error


def _class_of(kind: str) -> type[Exception] | None:
    candidate = globals().get(kind) or vars(builtins).get(kind)
    return candidate if isinstance(candidate, type) and issubclass(candidate, Exception) else None
