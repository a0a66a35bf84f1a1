"""The `quire` command.

Owns: the table of commands, --version, and how a command's error is reported: one line on stderr and an exit status.
Must not know: any command's options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from quire.base.env import VariableError
from quire.base.registry import load
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = os.path.basename(sys.argv[0]) or "quire"
    if arguments[:1] in (["-v"], ["--version"]):
        print(load("quire:__version__"))
        return 0
    try:
        return COMMANDS.call(arguments, program)
    except (QuireError, VariableError) as wrong:
        print(f"{' '.join((program, *arguments[:1]))}: {wrong}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has exited; Python would complain once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
