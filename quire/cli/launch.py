"""`quire launch render [MODEL]`: one component of a server on its own. So far there is one: the tokenizing front end.

Owns: the table of components and their flags, which are those of `quire serve`. The server itself is server/launch.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.clock import Laps
from quire.cli import serve
from quire.cli.dispatch import Command, CommandTable
from quire.config import EngineArgs, FlexibleArgumentParser, UsageContext

COMPONENTS = CommandTable(
    "component",
    {
        "render": Command(
            "quire.cli.launch:render",
            "answer /v1/chat/completions/render, /v1/completions/render and /tokenize, without an engine or weights",
        ),
    },
    title="components of a server",
)


def launch(arguments: Sequence[str], program: str) -> int:
    return COMPONENTS.call(arguments, program)


def render(arguments: Sequence[str], program: str) -> int:
    laps = Laps()
    args = make_parser(program).parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    args.disable_console = True  # there is no engine to chat with
    args.disable_log_stats = True  # and its counters would all be 0
    options = serve.options_of(args)
    serve.log_as_asked(args)
    laps.mark("options")
    config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext.RENDER_SERVER)
    laps.mark("model config")
    from quire.server.launch import serve_rendering  # lazy

    status: int = serve_rendering(options, config, laps)
    return status


def make_parser(program: str) -> FlexibleArgumentParser:
    parser = serve.make_parser(program)
    parser.description = (
        "Turn chat and completion requests into token ids and parameters, as `quire serve` with the same options "
        "would, for an engine elsewhere (/inference/v1/generate). Needs the configuration and the tokenizer of a "
        "model, but no weights and no GPU; engine options are validated and otherwise have no effect."
    )
    parser.epilog = "example:  quire launch render Qwen/Qwen3-0.6B --port 8100"
    return parser
