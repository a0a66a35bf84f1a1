"""The standard streams of a process of ours, which its caller may have closed, filled or given a narrow encoding.

A closed one becomes the null device: whatever is opened next would get its number, and Python has None in its place.
Text that the encoding of stdout lacks is written as escapes. Must not know what is written.
"""

from __future__ import annotations

import errno
import io
import os
import sys

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """For the beginning of a process, before it opens anything."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: the stream's own
        os.set_inheritable(opened, opened == number)
        stream = open(opened, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        setattr(sys, name, stream)


def escape_what_cannot_be_written() -> None:
    """An answer in another script, or half of a surrogate pair, does not end a program."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def why_stdout_fails() -> str | None:
    """Its error, if what it holds cannot be written; that is then dropped, so that Python's own end is quiet.

    None for an unbuffered one (PYTHONUNBUFFERED): what it could not write was in the error of that print.
    """
    try:
        sys.stdout.flush()
    except OSError as wrong:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return wrong.strerror or str(wrong)
    return None
