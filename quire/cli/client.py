"""`quire chat` and `quire complete`: a model in the terminal, streamed.

Who answers: the server at --url; else, if neither a model nor an engine option is set, a server at
http://localhost:8000/v1 if one responds; else an engine in this process, with every engine option as a flag. --local
skips servers. Only answers go to stdout; status, warnings and errors go to stderr. Ctrl-C stops an answer, Ctrl-D
quits. On a terminal a conversation has commands (conversation.py) and colours (terminal.py).
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from quire.base import env
from quire.base.clock import now
from quire.base.log import logger
from quire.cli.conversation import ONE_REQUEST, SETTINGS, ChatReply, Conversation, Message
from quire.cli.remote import LOCAL_URL, Remote, RemoteSpeaker, find_local, local_server
from quire.cli.terminal import messages, writer
from quire.config import EngineArgs, FlexibleArgumentParser
from quire.llm.engine import LLMEngine
from quire.schema.errors import ConfigError
from quire.schema.params import RequestOutputKind, SamplingParams
from quire.text.chat import check_template, tokenize_chat


def chat(arguments: Sequence[str], program: str) -> int:
    parser = make_parser(program, "Chat with a model in the terminal.")
    parser.add_argument("--system-prompt", help="system prompt of the conversation")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this message and exit")
    parser.add_argument("--chat-template", help="Jinja template, as a file or as text; default: the model's")
    args = parser.parse_args(arguments)
    start: list[Message] = []
    if args.system_prompt is not None:
        start.append({"role": "system", "content": args.system_prompt})
    with closing(make_speaker(args, parser)) as speaker:
        if args.quick is not None:
            speaker.answer([*start, {"role": "user", "content": args.quick}])
            return speaker.status
        conversation = Conversation(speaker, program, start, is_terminal=sys.stdin.isatty())
        for message in messages("you> ", "Ctrl-C stops an answer, Ctrl-D quits, /help lists commands."):
            if not conversation.take(message):
                break
    return 0


def complete(arguments: Sequence[str], program: str) -> int:
    parser = make_parser(program, "Complete a prompt.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete this prompt and exit")
    parser.set_defaults(max_tokens=128)
    args = parser.parse_args(arguments)
    with closing(make_speaker(args, parser)) as speaker:
        if args.quick is not None:
            speaker.complete(args.quick)
            return speaker.status
        for line in messages("text> ", "Ctrl-C stops a completion, Ctrl-D quits."):
            try:
                speaker.complete(line)
            except ONE_REQUEST as wrong:
                print(f"{program}: {wrong}", file=sys.stderr)
    return 0


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Options of the engine, of sampling, and of both commands. -q is --quick: the flag added last wins."""
    parser = FlexibleArgumentParser(prog=program, description=description, conflict_handler="resolve")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id (or --model)")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help=f"base URL of a server, such as {LOCAL_URL}")
    server.add_argument("--api-key", help="its API key; unset is OPENAI_API_KEY")
    server.add_argument("--model-name", help="which of its models; unset is the first")
    server.add_argument(
        "--local", action="store_true", help=f"run a model in this process even if a server responds at {LOCAL_URL}"
    )
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in SETTINGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=text)
    sampling.add_argument("--stop", action="append", default=None, help="stop before this text; repeatable")
    return parser


def make_speaker(args: argparse.Namespace, parser: argparse.ArgumentParser) -> LocalSpeaker | RemoteSpeaker:
    """The server at --url or on this machine, or an engine in this process."""
    if args.model_tag is not None:
        args.model = args.model_tag
    chosen = {name: value for name in (*SETTINGS, "stop") if (value := vars(args)[name]) is not None}
    SamplingParams(**chosen)  # an invalid value is refused before anything is loaded or sent
    hush()
    remote = choose_server(args, parser)
    if remote is None:
        return LocalSpeaker(args, chosen)
    speaker = RemoteSpeaker(remote, args.model_name or args.model, chosen, args.__dict__.get("chat_template"))
    print(f"{speaker.model} at {remote.url}", file=sys.stderr)
    return speaker


def choose_server(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Remote | None:
    changed = [
        name
        for name, value in vars(EngineArgs.from_cli_args(args)).items()
        if name != "model" and value != parser.get_default(name)
    ]
    if args.url is not None:
        if args.local:
            raise ConfigError("--url and --local are mutually exclusive")
        if changed:
            raise ConfigError(
                f"--{changed[0].replace('_', '-')} is an option of an engine in this process; the server at --url has "
                "its own",
                param=changed[0],
            )
        return Remote(args.url, args.api_key or env.OPENAI_API_KEY.get())
    if args.local or changed or args.model is not None:
        for name in ("api_key", "model_name"):
            if vars(args)[name] is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for a server, and a model in this process was asked for: name the "
                    "server with --url",
                    param=name,
                )
        return None
    if args.model_name is not None or args.api_key is not None:
        return local_server(args.api_key)
    return find_local()


class LocalSpeaker:
    """An engine in this process whose answers are streamed to stdout."""

    def __init__(self, args: argparse.Namespace, chosen: dict[str, Any]) -> None:
        self._template = args.__dict__.get("chat_template")
        if self._template is not None:
            check_template(self._template)
        with status(args.model or "the embedded model"):
            self._engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        self._tokenizer = self._engine.get_tokenizer()
        self._defaults = {"max_tokens": None} | self._engine.model_config.default_sampling
        self.sampling = chosen
        self._count = 0
        self.status = 0  # of the last answer: 130 if Ctrl-C stopped it

    def answer(self, messages: list[Message]) -> ChatReply:
        """The assistant's next message."""
        return self._stream(tokenize_chat(self._tokenizer, messages, chat_template=self._template))

    def complete(self, text: str) -> ChatReply:
        return self._stream(text)

    def close(self) -> None:
        self._engine.close()

    def _stream(self, prompt: Any) -> ChatReply:
        self._count += 1
        request_id = f"terminal-{self._count}"
        params = SamplingParams(**(self._defaults | self.sampling), output_kind=RequestOutputKind.DELTA)
        began = now()
        self._engine.add_request(request_id, prompt, params)
        out, chunks, times, finish = writer(), list[str](), list[float](), None
        num_tokens, context_left = 0, self._engine.model_config.max_model_len
        self.status = 0
        with interrupted() as stopped:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    chunks.append(output.outputs[0].text)
                    num_tokens += len(output.outputs[0].token_ids)
                    finish = output.outputs[0].finish_reason
                    context_left = self._engine.model_config.max_model_len - len(output.prompt_token_ids or ())
                    times.append(now())
                    out.write(chunks[-1])
                if stopped():
                    self._engine.abort_request([request_id])
                    self.status = 130
                    break
        out.close()
        first, rest = (times[0] - began, times[-1] - times[0]) if times else (0.0, 0.0)
        is_cut = finish == "length"
        return ChatReply("".join(chunks), num_tokens, first, rest, is_cut, is_cut and num_tokens >= context_left)


@contextmanager
def interrupted() -> Iterator[Callable[[], bool]]:
    """While an answer runs, Ctrl-C only sets a flag: an engine must not be interrupted in the middle of a step.

    A second one does interrupt it, and ends the command.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def status(model: str) -> Iterator[None]:
    """One line on stderr: what is loading, and how long it took."""
    start = now()
    print(f"loading {model} ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        print(file=sys.stderr)
        raise
    again = f"\rloading {model} ... " if sys.stderr.isatty() else ""  # a progress bar may have overwritten it
    print(f"{again}{now() - start:.1f} s", file=sys.stderr)


def hush() -> None:
    """Warnings only, unless the environment sets a level."""
    logger("quire")
    if not env.LOGGING_LEVEL.is_set():
        logging.getLogger("quire").setLevel(logging.WARNING)
