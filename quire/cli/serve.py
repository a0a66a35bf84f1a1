"""`quire serve [MODEL]`: runs a server from flags and an option file until it is stopped.

Owns: the parser (every engine option, every server option) and decisions made before anything heavy is imported.
The server itself is server/launch.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base.clock import Laps
from quire.config import EngineArgs, FlexibleArgumentParser, UsageContext
from quire.config.extras import LoggingConfig
from quire.config.flags import add_flags
from quire.config.logs import apply_logging
from quire.config.option import declarations
from quire.config.server import ServerConfig, flats, server_config
from quire.schema.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    from quire.engine.process_client import Begun

# The most common options; --help lists these and only names the groups of the others.
FIRST = (
    "--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--dtype", "--chat-template", "--enable-auto-tool-choice", "--tool-call-parser",
    "--reasoning-parser",
)  # fmt: skip
_EXAMPLE = "example:  quire serve Qwen/Qwen3-0.6B --port 8000 --api-key SECRET"


def serve(arguments: Sequence[str], program: str) -> int:
    laps = Laps()
    args = make_parser(program).parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    options = options_of(args)
    log_as_asked(args)
    laps.mark("options")
    if options.headless:
        return serve_node(args, options)
    begun: list[Begun] = []
    on_ray = args.data_parallel_backend == "ray" and args.data_parallel_size > 1
    has_process = not options.disable_frontend_multiprocessing and args.data_parallel_size_local != 0
    if has_process and not on_ray:  # its imports take the longest, so they start now
        from quire.engine.process_client import begin_engine  # lazy

        name = {} if args.data_parallel_size == 1 else {"name": f"engine {first_rank(args)}"}
        begun.append(begin_engine(shared=options.api_server_count > 1, **name))
    try:
        config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        laps.mark("model config")
        from quire.server.launch import serve as serve_  # lazy

        status: int = serve_(options, config, laps, begun)
    finally:
        for one in begun:
            one.end()
    return status


def serve_node(args: argparse.Namespace, options: ServerConfig) -> int:
    """`--headless`: what one machine of several has of an engine (nnodes), or some of the engines, for a server on
    another one."""
    of_one = args.nnodes > 1 and args.data_parallel_size == 1
    where = f"node {args.node_rank}" if of_one else f"the machine with engine {first_rank(args)}"
    try:
        config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER, headless=True)
    except ModelNotFoundError as absent:
        from quire.config.relocate import not_found_there  # lazy

        raise not_found_there(absent, where) from None
    parallel = config.parallel_config
    if parallel.nnodes == 1:
        from quire.engine.machines import run_engines  # lazy

        run_engines(config, stall_s=options.engine_stall_timeout)
        return 0
    if parallel.node_rank == 0:
        raise ConfigError(
            "headless is for the machines of nnodes after the first (node_rank 1 and above): the first has the server",
            param="headless",
            value=True,
        )
    from quire.executor.nodes import run_node  # lazy

    run_node(config)
    return 0


def first_rank(args: argparse.Namespace) -> int:
    """Of the engines that this program starts, before options are resolved."""
    if args.nnodes > 1 and args.data_parallel_size > 1:
        of_node: int = args.node_rank * args.data_parallel_size // args.nnodes
        return of_node
    rank: int = args.data_parallel_rank or args.data_parallel_start_rank or 0
    return rank


def make_parser(program: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog=program,
        description="Serve a model over HTTP: OpenAI's API with vLLM's options. Without MODEL, the embedded one.",
        epilog=f"{_EXAMPLE}\n\n--help=Frontend lists the server's options, --help=WORD finds options, "
        "--help=all lists every one, --help=page in a pager. --config FILE.yaml reads options from a file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="A folder, a .gguf file, or a hub id.")
    add_flags(parser, flats())
    EngineArgs.add_cli_args(parser)
    parser.first = FIRST
    parser.add_argument(  # the old spelling of the default
        "--disable-log-requests", dest="enable_log_requests", action="store_false", default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )  # fmt: skip
    return parser


def log_as_asked(args: argparse.Namespace) -> None:
    """Before anything is logged: whoever reads lines of JSON, or has them in a file, wants the first ones too."""
    apply_logging(LoggingConfig(**{name: vars(args)[name] for name in declarations(LoggingConfig)}))


def options_of(args: argparse.Namespace) -> ServerConfig:
    return server_config(**{flat.name: vars(args)[flat.name] for flat in flats()})
