"""`quire chat` and `quire complete`: a model in the terminal, streamed.

Who answers: the server at --url; else, when neither a model nor an engine option is given, a server that answers at
http://localhost:8000/v1; else an engine in this process, with every engine option as a flag. --local never looks for a
server. Answers go to stdout and nothing else does; status, warnings and errors go to stderr. Ctrl-C stops an answer,
Ctrl-D ends.
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
from quire.base.registry import load
from quire.cli.remote import LOCAL_URL, Remote, RemoteSpeaker, find_local, local_server
from quire.config import EngineArgs, FlexibleArgumentParser
from quire.llm.prompts import render
from quire.llm.stepper import LLMEngine
from quire.schema.errors import ConfigError, EngineGenerateError, InputError
from quire.schema.params import RequestOutputKind, SamplingParams

Message = dict[str, Any]
_ONE_REQUEST = (InputError, EngineGenerateError)  # the request is lost, the engine is not
_SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 always takes the most likely token"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "top_k": (int, "keep this many most likely tokens; 0 keeps all"),
    "min_p": (float, "drop tokens below this share of the most likely one"),
    "presence_penalty": (float, "against tokens that have occurred in the answer"),
    "frequency_penalty": (float, "against tokens by how often they have occurred in the answer"),
    "repetition_penalty": (float, "above 1: against tokens of the prompt and the answer"),
    "max_tokens": (int, "end the answer after this many tokens"),
}


def chat(arguments: Sequence[str], program: str) -> int:
    parser = make_parser(program, "Talk with a model in the terminal.")
    parser.add_argument("--system-prompt", help="what the model is told before the conversation")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this message and exit")
    parser.add_argument("--chat-template", help="Jinja template, as a file or as text; the model's own if not given")
    args = parser.parse_args(arguments)
    messages: list[Message] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    with closing(make_speaker(args, parser)) as speaker:
        if args.quick is not None:
            speaker.answer([*messages, {"role": "user", "content": args.quick}])
            return speaker.status
        for line in lines("you> ", "Ctrl-C stops an answer, Ctrl-D ends."):
            question: Message = {"role": "user", "content": line}
            try:
                answer = speaker.answer([*messages, question])
            except _ONE_REQUEST as wrong:  # too long for the model, say: the conversation stays as it was
                print(f"{program}: {wrong}", file=sys.stderr)
                continue
            messages += [question, {"role": "assistant", "content": answer}]
    return 0


def complete(arguments: Sequence[str], program: str) -> int:
    parser = make_parser(program, "Let a model continue a text.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue this text and exit")
    parser.set_defaults(max_tokens=128)
    args = parser.parse_args(arguments)
    with closing(make_speaker(args, parser)) as speaker:
        if args.quick is not None:
            speaker.complete(args.quick)
            return speaker.status
        for line in lines("text> ", "Ctrl-C stops a continuation, Ctrl-D ends."):
            try:
                speaker.complete(line)
            except _ONE_REQUEST as wrong:
                print(f"{program}: {wrong}", file=sys.stderr)
    return 0


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Options of the engine, of sampling, and of both commands. Here -q is --quick: what is added later wins."""
    parser = FlexibleArgumentParser(prog=program, description=description, conflict_handler="resolve")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True, use_tqdm_on_load=False)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id (or --model)")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help=f"base URL of a server, such as {LOCAL_URL}")
    server.add_argument("--api-key", help="its key; unset takes OPENAI_API_KEY")
    server.add_argument("--model-name", help="which of its models; unset takes the first")
    server.add_argument(
        "--local", action="store_true", help=f"run a model here even if a server answers at {LOCAL_URL}"
    )
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=text)
    sampling.add_argument("--stop", action="append", default=None, help="end before this text; may be repeated")
    return parser


def make_speaker(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Speaker | RemoteSpeaker:
    """A server that was named or found, or an engine here."""
    if args.model_tag is not None:
        args.model = args.model_tag
    asked = {name: value for name in (*_SAMPLING, "stop") if (value := vars(args)[name]) is not None}
    SamplingParams(**asked)  # a wrong value is refused before anything is loaded or sent
    hush()
    remote = choose_server(args, parser)
    if remote is None:
        return Speaker(args, asked)
    speaker = RemoteSpeaker(remote, args.model_name or args.model, asked, args.__dict__.get("chat_template"))
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
            raise ConfigError("--url and --local exclude each other")
        if changed:
            raise ConfigError(
                f"--{changed[0].replace('_', '-')} is an option of an engine in this process; the server at --url has "
                "its own",
                param=changed[0],
            )
        return Remote(args.url, args.api_key or env.OPENAI_API_KEY.get())
    if args.local or changed or args.model is not None:
        return None
    if args.model_name is not None or args.api_key is not None:
        return local_server(args.api_key)
    return find_local()


class Speaker:
    """An engine in this process whose answers are written to stdout as they come."""

    def __init__(self, args: argparse.Namespace, asked: dict[str, Any]) -> None:
        with status(args.model or "the embedded model"):
            self._engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        self._tokenizer = self._engine.get_tokenizer()
        defaults = {"max_tokens": None} | self._engine.model_config.default_sampling
        self._params = SamplingParams(**(defaults | asked), output_kind=RequestOutputKind.DELTA)
        self._template = args.__dict__.get("chat_template")
        self._count = 0
        self.status = 0  # of the last answer: 130 if Ctrl-C stopped it

    def answer(self, messages: list[Message]) -> str:
        """The assistant's next message."""
        return self._stream(render(self._tokenizer, messages, chat_template=self._template))

    def complete(self, text: str) -> str:
        return self._stream(text)

    def close(self) -> None:
        self._engine.close()

    def _stream(self, prompt: Any) -> str:
        self._count += 1
        request_id = f"terminal-{self._count}"
        self._engine.add_request(request_id, prompt, self._params)
        pieces: list[str] = []
        self.status = 0
        with interrupted() as stopped:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    pieces.append(output.outputs[0].text)
                    print(pieces[-1], end="", flush=True)
                if stopped():
                    self._engine.abort_request([request_id])
                    self.status = 130
                    break
        print(flush=True)
        return "".join(pieces)


def lines(prompt: str, greeting: str) -> Iterator[str]:
    """Lines from the terminal, or from a pipe without any prompt; empty ones are skipped, Ctrl-C clears the line."""
    terminal = sys.stdin.isatty()
    if terminal:
        load_line_editing()
        print(greeting, file=sys.stderr)
    while True:
        try:
            line = input(prompt if terminal else "")
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line.strip():
            yield line


def load_line_editing() -> None:
    """Importing readline gives input() history and editing, where the platform has it."""
    try:
        load("readline:parse_and_bind")
    except ImportError:
        return


@contextmanager
def interrupted() -> Iterator[Callable[[], bool]]:
    """While an answer runs, Ctrl-C only raises a flag: an engine must not be torn out of the middle of a step.

    A second one does tear it out, and ends the command.
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
    print(f"{now() - start:.1f} s", file=sys.stderr)


def hush() -> None:
    """Warnings only, unless the environment asks for a level."""
    logger("quire")
    if not env.LOGGING_LEVEL.is_set():
        logging.getLogger("quire").setLevel(logging.WARNING)
