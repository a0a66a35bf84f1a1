"""`quire chat` at a pseudo-terminal, with a scripted server to talk to: pastes, several lines, commands, colours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest

from tests.pseudo_terminal import Terminal
from tests.sse_server import Script, ScriptedServer

CODE = "import sys; from quire.cli.main import main; sys.argv[0] = 'quire'; sys.exit(main(sys.argv[1:]))"
WAIT_S = 60.0


def at_terminal(*arguments: str, **environment: str) -> Terminal:
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    given = clean | {"TERM": "xterm-256color", "INPUTRC": os.devnull} | environment
    return Terminal(sys.executable, "-c", CODE, *arguments, environment=given, seconds=WAIT_S)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(Script(pieces=3, words=("**one**", " two", " three"))) as running:
        yield running


def opened(server: ScriptedServer, **environment: str) -> Terminal:
    terminal = at_terminal("chat", "--url", f"{server.url}/v1", **environment)
    terminal.wait_for("you> ")
    return terminal


def asked(server: ScriptedServer) -> list[str]:
    """The last message of each request."""
    return [body["messages"][-1]["content"] for body in server.bodies("/v1/chat/completions")]


def end(terminal: Terminal) -> None:
    terminal.type("/bye\r")
    assert terminal.status() == 0
    os.close(terminal.fd)


def test_a_paste_is_one_message(server: ScriptedServer) -> None:
    terminal = opened(server)
    terminal.type("\x1b[200~def f():\n    return 1\n\nwhat is this?\x1b[201~")
    terminal.type("\r")
    terminal.wait_for("tokens/s")
    assert asked(server) == ["def f():\n    return 1\n\nwhat is this?"]
    end(terminal)


@pytest.mark.parametrize("typed", ["first\x1b\rsecond\r", "first\\\rsecond\r"], ids=["Alt-Enter", "backslash"])
def test_a_message_of_several_lines(server: ScriptedServer, typed: str) -> None:
    terminal = opened(server)
    terminal.type(typed)
    terminal.wait_for("tokens/s")
    assert asked(server) == ["first\nsecond"]
    end(terminal)


def test_colours_and_the_speed(server: ScriptedServer) -> None:
    terminal = opened(server)
    terminal.type("hi\r")
    seen = terminal.wait_for("tokens/s") + terminal.wait_for("you> ")
    assert "\x1b[1mone\x1b[0m two three" in seen
    assert re.search(r"\[3 tokens, [\d.]+ tokens/s, first after [\d.]+ s", seen)
    end(terminal)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_they_are_not_wanted(server: ScriptedServer, environment: dict[str, str]) -> None:
    terminal = opened(server, **environment)
    terminal.type("hi\r")
    seen = terminal.wait_for("tokens/s")
    assert "**one** two three" in seen and "\x1b[1m" not in seen and "\x1b[2m" not in seen
    end(terminal)


def test_commands_at_the_terminal(server: ScriptedServer) -> None:
    terminal = opened(server)
    terminal.type("/system Be brief.\r")
    terminal.wait_for("is set")
    terminal.type("/set temperature 0.25\r")
    terminal.wait_for("temperature: 0.25")
    terminal.type("hi\r")
    terminal.wait_for("tokens/s")
    (body,) = server.bodies("/v1/chat/completions")
    assert body["temperature"] == 0.25 and body["messages"][0] == {"role": "system", "content": "Be brief."}
    terminal.type("/help\r")
    assert "/save FILE" in terminal.wait_for("/bye")
    end(terminal)
