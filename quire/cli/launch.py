"""`quire launch render [MODEL]`: a part of a server by itself. Today there is one: the part that makes token ids.

Owns: the table of parts and their flags, which are those of `quire serve`. The server itself is server/launch.py.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from quire.base.clock import Laps
from quire.base.registry import load
from quire.cli import serve
from quire.config import EngineArgs, FlexibleArgumentParser, UsageContext

PARTS = {
    "render": (
        "quire.cli.launch:render",
        "answer /v1/chat/completions/render, /v1/completions/render and /tokenize, without an engine or weights",
    ),
}


def launch(arguments: Sequence[str], program: str) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(program))
        return 0
    name, rest = arguments[0], list(arguments[1:])
    if name not in PARTS:
        print(f"{program}: {unknown(name)}", file=sys.stderr)
        return 2
    status: int = load(PARTS[name][0])(rest, f"{program} {name}")
    return status


def usage(program: str) -> str:
    lines = [f"usage: {program} PART ...", "", "parts of a server:"]
    lines += [f"  {name:<12}{summary}" for name, (_, summary) in PARTS.items()]
    return "\n".join([*lines, "", f"'{program} PART --help' lists its options."])


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, PARTS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown part '{name}'{hint} Parts: {', '.join(PARTS)}"


def render(arguments: Sequence[str], program: str) -> int:
    laps = Laps()
    args = make_parser(program).parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    args.disable_console = True  # nobody answers there
    args.disable_log_stats = True  # and an engine's numbers would all be 0
    options = serve.options_of(args)
    laps.mark("options")
    config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext.RENDER_SERVER)
    laps.mark("model config")
    from quire.server.launch import serve_rendering  # lazy

    status: int = serve_rendering(options, config, laps)
    return status


def make_parser(program: str) -> FlexibleArgumentParser:
    parser = serve.make_parser(program)
    parser.description = (
        "Make token ids and parameters of chat and completion requests, as `quire serve` with the same options would, "
        "for an engine elsewhere (/inference/v1/generate). Needs the configuration and the tokenizer of a model, no "
        "weights and no GPU; options of the engine are checked and otherwise without effect."
    )
    parser.epilog = "example:  quire launch render Qwen/Qwen3-0.6B --port 8100"
    return parser
