"""Writes the reference pages under docs/reference from the declarations in the code, or checks that they are current.

python tools/reference.py            writes
python tools/reference.py --check    exits 1 and names the pages that are out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from options_page import NOTE, environment_page, options_page
from python_api import python_page

from quire.base.registry import load
from quire.cli.bench import BENCHMARKS
from quire.cli.launch import COMPONENTS
from quire.cli.main import COMMANDS
from quire.config import EngineArgs, FlexibleArgumentParser
from quire.config.flags import add_flags
from quire.config.server import flats
from quire.observe.declared import TABLE, MetricDeclaration, drafts_table, http_table

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("%%", "%")


# ---- metrics ------------------------------------------------------------------------------------------------------


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "What `GET /metrics` of a server shows, and `LLM.get_metrics()` returns (`disable_log_stats=False`). Names,",
        "labels and buckets are vLLM's. Every metric has the labels `model_name` (the first served name) and `engine`,",
        "unless the table says otherwise. On the page a counter's name ends in `_total`, a histogram has `_bucket`,",
        "`_sum` and `_count`, and all of these have a `_created` line (`PROMETHEUS_DISABLE_CREATED_SERIES=1` leaves",
        "those out). [How to use them](../server/metrics.md).",
        "",
        *_table(TABLE),
        "",
        "## Speculative decoding",
        "",
        "Only with [speculative decoding](../features/speculative.md). `position` counts from 0 to",
        "`num_speculative_tokens` - 1; `LLM.get_metrics()` returns these counters as one `Vector`.",
        "",
        *_table(drafts_table(1), values=False),
        "",
        "## HTTP",
        "",
        "Only on the page of a server, without `model_name` and `engine`. `handler` is a route as it is written, or",
        "`none` for a path that is no route; `method` is one of the usual methods or `other`; `status` is `2xx`, `4xx`",
        "and so on. Probes (`/health`, `/ping`, `/load`, `/version`, `/server_info`) and `/metrics` are not counted.",
        "",
        *_table(http_table(()), values=False),
        "",
        "A server with one API process also shows `process_resident_memory_bytes` and the other `process_` numbers of",
        "that process.",
    ]
    return "\n".join(lines) + "\n"


def _table(entries: tuple[MetricDeclaration, ...], *, values: bool = True) -> list[str]:
    lines = ["| metric | kind | further labels | meaning |", "|---|---|---|---|"]
    for entry in entries:
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        if values and entry.labels:
            labels += f": {', '.join(value for (value,) in entry.values)}"
        if not entry.per_engine:
            labels += "; no `engine`"
        old = "".join(f" Also under its old name `{name}`." for name in entry.old_names)
        lines.append(f"| `{entry.name}` | {entry.kind} | {labels} | {cell(entry.doc)}{old} |")
    return lines


# ---- commands -----------------------------------------------------------------------------------------------------


class _FoundError(Exception):
    """Carries a command's parser out of the command."""


class _Caught(FlexibleArgumentParser):
    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        raise _FoundError(self)


def parser_of(path: str, program: str) -> argparse.ArgumentParser | None:
    """The parser a command would use; None if it has none."""
    command = load(path)
    original = FlexibleArgumentParser.parse_args
    FlexibleArgumentParser.parse_args = _Caught.parse_args  # type: ignore[method-assign, assignment]
    try:
        command([], program)
    except _FoundError as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    finally:
        FlexibleArgumentParser.parse_args = original  # type: ignore[method-assign]
    return None


def commands() -> str:
    lines = [
        "# Commands",
        "",
        "`quire COMMAND --help` says the same in the terminal. Options of the engine and of the server are on",
        "[their own page](options.md); where a command takes them, it says so.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"## quire {name}", "", f"{_sentence(command.summary)}", ""]
        further = {"bench": BENCHMARKS, "launch": COMPONENTS}.get(name, {})
        for second, (path, summary) in further.items():
            program = f"quire {name} {second}"
            lines += [f"### {program}", "", _sentence(summary), "", *_options(path, program)]
        if not further:
            lines += _options(command.path, f"quire {name}")
    return "\n".join(lines).rstrip() + "\n"


def _sentence(words: str) -> str:
    first = words.split()[0]
    begin = words if re.search(r"[-_:/]", first) else words[0].upper() + words[1:]  # a name stays as it is written
    return begin.rstrip(".") + "."


def _options(path: str, program: str) -> list[str]:
    parser = None if path.endswith(":collect_env") else parser_of(path, program)
    if parser is None:
        return []
    engine, server = _shared(EngineArgs.add_cli_args), _shared(lambda parser: add_flags(parser, flats()))
    own = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    taken = {action.dest for action in own}
    lines, hidden = [], set[str]()
    for shared, words in ((engine, "Takes every engine option."), (server, "Takes every option of the server.")):
        if len(taken & shared) > len(shared) // 2:
            lines += [words, ""]
            hidden |= shared
    shown = [action for action in own if action.dest not in hidden]
    if shown:
        lines += ["| option | default | meaning |", "|---|---|---|", *map(_row, shown), ""]
    return lines


def _shared(add: Callable[[FlexibleArgumentParser], object]) -> set[str]:
    parser = FlexibleArgumentParser()
    add(parser)
    return {action.dest for action in parser._actions}


def _row(action: argparse.Action) -> str:
    name = " ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
    silent = action.default is None or action.default in (False, argparse.SUPPRESS, (), []) or action.const is True
    default = "" if silent else f"`{re.sub('-[0-9a-f]{8}-', '-…-', str(action.default))}`"  # one part is random
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    words = re.sub(r" \(default: [^)]*\)", "", (action.help or "").replace("%%", "%"))
    return f"| {cell(name)} | {cell(default)} | {cell(_sentence(words) if words else '')}{cell(choices)} |"


def pages() -> dict[Path, str]:
    made = {
        "options.md": options_page(),
        "environment.md": environment_page(),
        "metrics.md": metrics(),
        "commands.md": commands(),
        "python.md": python_page(),
    }
    return {FOLDER / name: NOTE + text for name, text in made.items()}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if check and stale:
        print(f"out of date: {', '.join(path.name for path in stale)}; run  make reference")
        return 1
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(FOLDER.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
