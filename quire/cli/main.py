"""The `quire` command.

Owns: the table of commands, --version, and how a command's error is reported: one line on stderr and an exit status.
So is an output that cannot be written; standard streams that are closed are opened (base/standard_streams.py).
Must not know: any command's options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from quire.base.env import VariableError
from quire.base.registry import load
from quire.base.standard_streams import FULL, escape_what_cannot_be_written, open_missing, why_stdout_fails
from quire.cli.dispatch import Command, CommandTable
from quire.schema.errors import QuireError

COMMANDS = CommandTable(
    "command",
    {
        "serve": Command("quire.cli.serve:serve", "serve a model over HTTP with OpenAI's API"),
        "chat": Command("quire.cli.client:chat", "chat with a model in the terminal"),
        "run": Command("quire.cli.client:chat", "the same as chat"),
        "complete": Command("quire.cli.client:complete", "complete a prompt"),
        "pull": Command("quire.cli.models:pull", "download a model from the hub"),
        "list": Command("quire.cli.models:list_models", "list the models on this machine"),
        "bench": Command("quire.cli.bench:bench", "benchmark a server, the engine or its start-up"),
        "simulate": Command("quire.simulate.command:main", "predict how many GPUs a load needs, and how it is served"),
        "run-batch": Command("quire.cli.batch:run_batch", "answer a file of requests in OpenAI's batch format"),
        "launch": Command("quire.cli.launch:launch", "run one component of a server: render, which tokenizes requests"),
        "collect-env": Command("quire.cli.tools:collect_env", "print versions and hardware, for a bug report"),
    },
    flags={"-h, --help": "show this help", "-v, --version": "show the version"},
)


def main(argv: Sequence[str] | None = None) -> int:
    open_missing()
    escape_what_cannot_be_written()
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = os.path.basename(sys.argv[0]) or "quire"
    try:
        try:
            return _call(arguments, program)
        finally:
            sys.stdout.flush()  # what fails here would fail while Python exits
    except BrokenPipeError:  # the reader of our output has exited
        why_stdout_fails()
        return 141
    except OSError as wrong:
        reason = why_stdout_fails() or (wrong.strerror if wrong.errno in FULL and wrong.filename is None else None)
        if reason is None:
            raise
        print(f"{_named(arguments, program)}: cannot write: {reason}", file=sys.stderr)
        return 1


def _call(arguments: list[str], program: str) -> int:
    if arguments[:1] in (["-v"], ["--version"]):
        print(load("quire:__version__"))
        return 0
    try:
        return COMMANDS.call(arguments, program)
    except (QuireError, VariableError) as wrong:
        print(f"{_named(arguments, program)}: {wrong}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _named(arguments: list[str], program: str) -> str:
    return " ".join((program, *arguments[:1]))


if __name__ == "__main__":
    sys.exit(main())
