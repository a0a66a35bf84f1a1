"""renamed: refusals in the words of the dialect that asked.

A dialect that makes a chat request of its own request has other names for some fields; what is refused inside is told
with the client's name for it. Must not know: any dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.schema.errors import InputError


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """`names`: field of the chat request -> the client's own."""
    try:
        yield
    except InputError as wrong:
        if wrong.param is None or (name := names.get(wrong.param)) is None:
            raise
        raise type(wrong)(str(wrong).replace(wrong.param, name), param=name, value=wrong.value) from wrong
