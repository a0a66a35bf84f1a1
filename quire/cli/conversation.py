"""A conversation in the terminal: its messages, the commands that change it, what is dropped when it grows too long.

In: what a user typed, and a speaker that answers messages. Out: answers at the terminal; remarks on stderr.
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
ONE_REQUEST = (InputError, EngineGenerateError)  # the request is lost, whoever answers is not
SETTINGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 always takes the most likely token"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "top_k": (int, "keep this many most likely tokens; 0 keeps all"),
    "min_p": (float, "drop tokens below this share of the most likely one"),
    "presence_penalty": (float, "against tokens that have occurred in the answer"),
    "frequency_penalty": (float, "against tokens by how often they have occurred in the answer"),
    "repetition_penalty": (float, "above 1: against tokens of the prompt and the answer"),
    "max_tokens": (int, "end the answer after this many tokens"),
}
_COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation, keep the system prompt",
    "/system [TEXT]": "set the system prompt; without TEXT show it; - removes it",
    "/set [NAME [VALUE]]": "set how answers are sampled; without VALUE the default; alone shows all",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a conversation from a file",
    "/bye": "end (so does Ctrl-D)",
}
_TOO_LONG = re.compile(r"max_model_len|max(imum)? (model|context) len|context (length|window|size)", re.IGNORECASE)
_ROLES = ("system", "user", "assistant", "tool")
_LARGEST_FILE = 16 << 20


class ChatReply(NamedTuple):
    """An answer, and how it came."""

    text: str
    num_tokens: int = 0
    first_s: float = 0.0  # until its first piece
    rest_s: float = 0.0  # from there to its last
    is_cut: bool = False  # by a limit of tokens, not by its own end
    is_full: bool = False  # that limit was the model's context


class Speaker(Protocol):
    status: int
    asked: dict[str, Any]  # sampling that was asked for, as SETTINGS and `stop` name it

    def answer(self, messages: list[Message]) -> ChatReply: ...


@dataclass
class Conversation:
    speaker: Speaker
    program: str
    messages: list[Message] = field(default_factory=list)
    is_terminal: bool = False  # whether commands are commands and remarks are made
    _is_full: bool = False  # the last answer ended where the context did

    def take(self, typed: str) -> bool:
        """Answer what was typed, or do what it says. False: the user wants to end."""
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
        words = [f"{answered.num_tokens} token{'s' if answered.num_tokens != 1 else ''}"]
        if answered.num_tokens > 1 and answered.rest_s > 0:
            words.append(f"{(answered.num_tokens - 1) / answered.rest_s:.1f} tokens/s")
        words.append(f"first after {answered.first_s:.2f} s")
        if self.speaker.status:
            words.append("stopped")
        elif answered.is_cut:
            words.append("cut: the context is full" if answered.is_full else "cut at the limit of tokens")
        self._say(f"[{', '.join(words)}]")

    def _drop_oldest(self) -> bool:
        """The oldest question and its answer go. False if there is none."""
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
            self._say(f"there is no {name}; /help lists the commands, //… sends a message that begins with a slash")
            return True
        try:
            doers[name](rest)
        except (InputError, OSError) as wrong:
            self._say(str(wrong))
        return True

    def _help(self, rest: str) -> None:
        width = max(map(len, _COMMANDS)) + 2
        lines = [f"{name:<{width}}{words}" for name, words in _COMMANDS.items()]
        lines += ["", "A paste is one message. Alt-Enter, or a backslash at a line's end, goes on in the next line."]
        self._say("\n".join(lines))

    def _clear(self, rest: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._is_full = False
        self._say("the conversation is forgotten")

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
            asked = self.speaker.asked
            self._say("\n".join(f"{key:<{width}}{asked.get(key, 'default')}" for key in SETTINGS))
            return
        if name not in SETTINGS:
            raise InputError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        changed = {key: value for key, value in self.speaker.asked.items() if key != name}
        if text.strip():
            kind = SETTINGS[name][0]
            try:
                changed[name] = kind(text)
            except ValueError:
                raise InputError(f"{name} must be {'a whole ' if kind is int else 'a '}number, got {text!r}") from None
        SamplingParams(**changed)
        self.speaker.asked = changed
        self._say(f"{name}: {changed.get(name, 'default')}")

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        if os.path.exists(path):
            read(path)  # only another conversation is written over
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"messages": self.messages, "settings": self.speaker.asked}, file, ensure_ascii=False, indent=1)
        self._say(f"{len(self.messages)} messages are in {path}")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        self.messages, self._is_full = read(path), False
        self._say(f"{len(self.messages)} messages from {path}")

    def _say(self, words: str) -> None:
        print(dim(words), file=sys.stderr)


def _path(given: str, command: str) -> str:
    if not given:
        raise InputError(f"{command} needs the name of a file")
    return os.path.expanduser(given)


def read(path: str) -> list[Message]:
    """The messages of a saved conversation, checked."""
    if (size := os.path.getsize(path)) > _LARGEST_FILE:
        raise InputError(f"{path} has {size} bytes; a conversation may have {_LARGEST_FILE}")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        found = content["messages"]
        messages = [{"role": one["role"], "content": one["content"]} for one in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is no saved conversation") from None
    if any(one["role"] not in _ROLES or not isinstance(one["content"], str) for one in messages):
        raise InputError(f"{path} is no saved conversation: a message has no text, or none of {', '.join(_ROLES)}")
    return messages
