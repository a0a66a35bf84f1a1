"""The `quire` command: one table of commands, each loaded when it is called, so that --help costs almost nothing.

Owns: the table, --help, --version, and how an error leaves a command: one line on stderr and an exit status.
Must not know: any command's options.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from quire.base.env import VariableError
from quire.base.registry import load
from quire.schema.errors import QuireError


class Command(NamedTuple):
    path: str  # function (arguments, program name) -> exit status
    summary: str


COMMANDS = {
    "serve": Command("quire.cli.serve:serve", "serve a model over HTTP, as OpenAI's API"),
    "chat": Command("quire.cli.client:chat", "talk with a model in the terminal"),
    "run": Command("quire.cli.client:chat", "the same as chat"),
    "complete": Command("quire.cli.client:complete", "let a model continue a text"),
    "pull": Command("quire.cli.models:pull", "fetch a model from the hub"),
    "list": Command("quire.cli.models:list_models", "list the models on this machine"),
    "bench": Command("quire.cli.bench:bench", "measure a server, the engine or its start"),
    "run-batch": Command("quire.cli.batch:run_batch", "answer a file of requests in OpenAI's batch format"),
    "launch": Command("quire.cli.launch:launch", "a part of a server by itself: render, which makes token ids"),
    "collect-env": Command("quire.cli.tools:collect_env", "print versions and hardware, for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = os.path.basename(sys.argv[0]) or "quire"
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(program))
        return 0
    if arguments[0] in ("-v", "--version"):
        print(load("quire:__version__"))
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"{program}: {unknown(name)}", file=sys.stderr)
        return 2
    return run(COMMANDS[name], rest, f"{program} {name}")


def run(command: Command, arguments: list[str], program: str) -> int:
    try:
        status: int = load(command.path)(arguments, program)
    except (QuireError, VariableError) as wrong:
        print(f"{program}: {wrong}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone; Python would complain once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def usage(program: str) -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"usage: {program} [-h] [-v] COMMAND ...", "", "commands:"]
    lines += [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "options:", "  -h, --help     this text", "  -v, --version  the version", ""]
    lines += [f"'{program} COMMAND --help' lists a command's options."]
    return "\n".join(lines)


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown command '{name}'{hint} Commands: {', '.join(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
