"""A conversation in the terminal: its messages, its commands, and what is dropped when it grows too long.

In: what a user typed, and a speaker that answers messages. Out: answers on the terminal; notices on stderr.
Must not know: engines, servers.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.cli.terminal import dim
from quire.schema.errors import EngineGenerateError, InputError
from quire.schema.params import SamplingParams

Message = dict[str, Any]
ONE_REQUEST = (InputError, EngineGenerateError)  # the request failed, the speaker is still usable
SETTINGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 always picks the most likely token"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "top_k": (int, "keep this many most likely tokens; 0 keeps all"),
    "min_p": (float, "drop tokens below this share of the most likely one"),
    "presence_penalty": (float, "penalize tokens that have occurred in the answer"),
    "frequency_penalty": (float, "penalize tokens by how often they have occurred in the answer"),
    "repetition_penalty": (float, "above 1: penalize tokens of the prompt and the answer"),
    "max_tokens": (int, "maximum tokens of an answer"),
}
_COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation, keep the system prompt",
    "/system [TEXT]": "set the system prompt; without TEXT show it; - removes it",
    "/set [NAME [VALUE]]": "set a sampling parameter; without VALUE restore the default; alone show all",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "continue a conversation from a file",
    "/bye": "quit (so does Ctrl-D)",
}
_TOO_LONG = re.compile(r"max_model_len|max(imum)? (model|context) len|context (length|window|size)", re.IGNORECASE)
_ROLES = ("system", "user", "assistant", "tool")
_LARGEST_FILE = 16 << 20


class ChatReply(NamedTuple):
    """An answer and its timing."""

    text: str
    num_tokens: int = 0
    first_s: float = 0.0  # until its first chunk
    rest_s: float = 0.0  # from there to its last
    is_cut: bool = False  # by a token limit
    is_full: bool = False  # that limit was the model's context


class Speaker(Protocol):
    status: int
    sampling: dict[str, Any]  # the user's sampling parameters: keys of SETTINGS, and `stop`

    def answer(self, messages: list[Message]) -> ChatReply: ...


@dataclass
class Conversation:
    speaker: Speaker
    program: str
    messages: list[Message] = field(default_factory=list)
    is_terminal: bool = False  # whether commands are recognized and notices printed
    _is_full: bool = False  # the last answer ended where the context did

    def take(self, typed: str) -> bool:
        """Answer the message, or run the command. False: the user wants to quit."""
        if self.is_terminal and re.fullmatch(r"/[A-Za-z]+( .*)?", typed.strip()):
            return self._command(typed.strip())
        self.ask(typed[1:] if self.is_terminal and typed.startswith("//") else typed)
        return True

    def ask(self, text: str) -> None:
        question: Message = {"role": "user", "content": text}
        if self._is_full:
            self._drop_oldest()
        while True:
            try:
                answered = self.speaker.answer([*self.messages, question])
                break
            except ONE_REQUEST as wrong:
                if not (_TOO_LONG.search(str(wrong)) and self._drop_oldest()):
                    print(f"{self.program}: {wrong}", file=sys.stderr)
                    return
        self.messages += [question, {"role": "assistant", "content": answered.text}]
        self._is_full = answered.is_full
        if self.is_terminal:
            self._remark(answered)

    def _remark(self, answered: ChatReply) -> None:
        parts = [f"{answered.num_tokens} token{'s' if answered.num_tokens != 1 else ''}"]
        if answered.num_tokens > 1 and answered.rest_s > 0:
            parts.append(f"{(answered.num_tokens - 1) / answered.rest_s:.1f} tokens/s")
        parts.append(f"first after {answered.first_s:.2f} s")
        if self.speaker.status:
            parts.append("stopped")
        elif answered.is_cut:
            parts.append("cut off: the context is full" if answered.is_full else "cut off by max_tokens")
        self._say(f"[{', '.join(parts)}]")

    def _drop_oldest(self) -> bool:
        """Drop the oldest question and its answer. False if there is none."""
        first = next((i for i, message in enumerate(self.messages) if message["role"] != "system"), None)
        if first is None:
            return False
        end = first + 1
        while end < len(self.messages) and self.messages[end]["role"] != "user":
            end += 1
        del self.messages[first:end]
        self._say("[the conversation no longer fits into the model's context: its oldest turn was dropped]")
        return True

    # ---- commands

    def _command(self, typed: str) -> bool:
        name, _, rest = typed.partition(" ")
        rest = rest.strip()
        if name in ("/bye", "/exit", "/quit"):
            return False
        doers: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/?": self._help, "/clear": self._clear, "/system": self._system, "/set": self._set,
            "/save": self._save, "/load": self._load,
        }  # fmt: skip
        if name not in doers:
            self._say(f"unknown command {name}; /help lists the commands, //… sends a message that starts with a slash")
            return True
        try:
            doers[name](rest)
        except InputError as wrong:
            self._say(str(wrong))
        except OSError as wrong:
            self._say(f"{wrong.filename or rest}: {wrong.strerror or wrong}")
        return True

    def _help(self, rest: str) -> None:
        width = max(map(len, _COMMANDS)) + 2
        lines = [f"{name:<{width}}{summary}" for name, summary in _COMMANDS.items()]
        lines += [
            "",
            "A paste is one message. Alt-Enter, or a backslash at the end of a line, continues on the next line.",
        ]
        self._say("\n".join(lines))

    def _clear(self, rest: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._is_full = False
        self._say("the conversation is cleared")

    def _system(self, rest: str) -> None:
        now = next((message["content"] for message in self.messages if message["role"] == "system"), None)
        if not rest:
            self._say("there is no system prompt" if now is None else f"system prompt: {now}")
            return
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = others if rest == "-" else [{"role": "system", "content": rest}, *others]
        self._say("no system prompt" if rest == "-" else "the system prompt is set")

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        name = name.replace("-", "_")
        if not rest:
            width = max(map(len, SETTINGS)) + 2
            sampling = self.speaker.sampling
            self._say("\n".join(f"{key:<{width}}{sampling.get(key, 'default')}" for key in SETTINGS))
            return
        if name not in SETTINGS:
            raise InputError(f"unknown setting {name!r}; settings are {', '.join(SETTINGS)}")
        changed = {key: value for key, value in self.speaker.sampling.items() if key != name}
        if text.strip():
            kind = SETTINGS[name][0]
            try:
                changed[name] = kind(text)
            except ValueError:
                raise InputError(f"{name} must be {'a whole ' if kind is int else 'a '}number, got {text!r}") from None
        SamplingParams(**changed)
        self.speaker.sampling = changed
        self._say(f"{name}: {changed.get(name, 'default')}")

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        if os.path.exists(path):
            read(path)  # overwrites only another conversation
        with open(path, "w", encoding="utf-8") as file:
            json.dump(
                {"messages": self.messages, "settings": self.speaker.sampling}, file, ensure_ascii=False, indent=1
            )
        self._say(f"saved {len(self.messages)} messages to {path}")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        self.messages, self._is_full = read(path), False
        self._say(f"loaded {len(self.messages)} messages from {path}")

    def _say(self, text: str) -> None:
        print(dim(text), file=sys.stderr)


def _path(text: str, command: str) -> str:
    if not text:
        raise InputError(f"{command} needs a file name")
    return os.path.expanduser(text)


def read(path: str) -> list[Message]:
    """The messages of a saved conversation, validated."""
    if (size := os.path.getsize(path)) > _LARGEST_FILE:
        raise InputError(f"{path} has {size} bytes; a conversation may have at most {_LARGEST_FILE}")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        saved = content["messages"]
        messages = [{"role": one["role"], "content": one["content"]} for one in saved]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is not a saved conversation") from None
    if any(one["role"] not in _ROLES or not isinstance(one["content"], str) for one in messages):
        raise InputError(
            f"{path} is not a saved conversation: a message has no text, or no role of {', '.join(_ROLES)}"
        )
    return messages
