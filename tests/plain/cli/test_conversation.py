"""A conversation's commands and its end of room, with a scripted speaker; Markdown as a terminal gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli import terminal
from quire.cli.conversation import ChatReply, Conversation
from quire.schema.errors import InputError


class Speaker:
    """Answers with the number of messages; holds at most `room` of them."""

    def __init__(self, room: int = 99) -> None:
        self.status, self.sampling, self.room = 0, dict[str, Any](), room
        self.heard: list[list[dict[str, Any]]] = []

    def answer(self, messages: list[dict[str, Any]]) -> ChatReply:
        if len(messages) > self.room:
            raise InputError(f"the prompt has {len(messages)} tokens; that is more than max_model_len ({self.room})")
        self.heard.append(list(messages))
        return ChatReply(f"answer {len(self.heard)}", 11, 0.25, 0.5)


@pytest.fixture
def talk() -> Conversation:
    return Conversation(Speaker(), "quire chat", is_terminal=True)


def texts(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


def test_tokens_a_second_follow_an_answer(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.take("hi")
    assert capsys.readouterr().err == "[11 tokens, 20.0 tokens/s, first after 0.25 s]\n"


def test_a_pipe_gets_no_remarks_and_has_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(Speaker(), "quire chat")
    assert talk.take("/bye") and talk.take("/help")
    assert texts(talk) == ["/bye", "answer 1", "/help", "answer 2"] and capsys.readouterr().err == ""


def test_a_full_context_drops_the_oldest_turns_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    start = [{"role": "system", "content": "be brief"}]
    talk = Conversation(Speaker(room=4), "quire chat", start, is_terminal=True)
    for question in ("one", "two", "three"):
        talk.ask(question)
    assert texts(talk) == ["be brief", "two", "answer 2", "three", "answer 3"]
    assert capsys.readouterr().err.count("its oldest turn was dropped") == 1


def test_a_question_that_never_fits_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(Speaker(room=0), "quire chat", is_terminal=True)
    talk.ask("too long")
    assert texts(talk) == [] and "quire chat: the prompt has 1 tokens" in capsys.readouterr().err


def test_an_answer_that_filled_the_context_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker()
    talk = Conversation(speaker, "quire chat", is_terminal=True)
    monkeypatch.setattr(speaker, "answer", lambda messages: ChatReply("cut", 5, 0.1, 0.1, True, True))
    talk.ask("one")
    monkeypatch.undo()
    talk.ask("two")
    assert [m["content"] for m in speaker.heard[0]] == ["two"]


def test_clear_and_system(talk: Conversation) -> None:
    talk.take("/system Speak like a pirate.")
    talk.take("hi")
    assert texts(talk)[0] == "Speak like a pirate." and talk.messages[0]["role"] == "system"
    talk.take("/clear")
    assert texts(talk) == ["Speak like a pirate."]
    talk.take("/system -")
    assert texts(talk) == []


def test_set(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.take("/set temperature 0.5")
    talk.take("/set max-tokens 7")
    assert talk.speaker.sampling == {"temperature": 0.5, "max_tokens": 7}
    for wrong in ("/set temperature -1", "/set temperature hot", "/set warmth 3"):
        assert talk.take(wrong)
    assert talk.speaker.sampling == {"temperature": 0.5, "max_tokens": 7}
    told = capsys.readouterr().err
    assert "temperature must be" in told and "got 'hot'" in told and "unknown setting 'warmth'" in told
    talk.take("/set temperature")
    assert talk.speaker.sampling == {"max_tokens": 7}
    talk.take("/set")
    assert "temperature         default" in capsys.readouterr().err


def test_save_and_load(talk: Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk.take("grüß dich")
    path = tmp_path / "talk.json"
    talk.take(f"/save {path}")
    other = Conversation(Speaker(), "quire chat", is_terminal=True)
    other.take(f"/load {path}")
    assert other.messages == talk.messages
    talk.take(f"/save {path}")  # over itself
    mine = tmp_path / "mine.txt"
    mine.write_text("a diary")
    talk.take(f"/save {mine}")
    assert mine.read_text() == "a diary" and "is not a saved conversation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", '{"messages": 3}', '{"messages": [{"role": "root", "content": "x"}]}',
                '{"messages": [{"role": "user", "content": [1]}]}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_conversation(
    content: str, talk: Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("hi")
    path = tmp_path / "other.json"
    path.write_text(content)
    assert talk.take(f"/load {path}") and talk.take("/load /no/such/file") and talk.take("/load")
    assert talk.take("/save /no/such/x")
    assert texts(talk) == ["hi", "answer 1"]
    told = capsys.readouterr().err
    assert (
        "is not a saved conversation" in told
        and told.count("[Errno") == 0
        and "/no/such/x: No such file or directory" in told
        and "needs a file name" in told
    )


def test_slashes(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.take("/hlep")
    assert "unknown command /hlep" in capsys.readouterr().err and texts(talk) == []
    talk.take("//etc/passwd is a file")
    talk.take("/* a comment\n of two lines */")
    assert texts(talk)[::2] == ["/etc/passwd is a file", "/* a comment\n of two lines */"]
    talk.take("/help")
    told = capsys.readouterr().err
    assert all(name in told for name in ("/help", "/clear", "/system", "/set", "/save", "/load", "/bye"))
    assert talk.take("/bye") is False


def test_a_saved_file_is_plain_json(talk: Conversation, tmp_path: Path) -> None:
    talk.take("/set top_k 4")
    talk.take("hi")
    talk.take(f"/save {tmp_path / 'x.json'}")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["settings"] == {"top_k": 4} and [m["role"] for m in content["messages"]] == ["user", "assistant"]


# ---- Markdown ------------------------------------------------------------------------------------------------------

BOLD, DIM, CODE, HEAD, OFF = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[1;35m", "\x1b[0m"
CASES = {
    "plain text": "plain text",
    "a **bold** word": f"a {BOLD}bold{OFF} word",
    "2 * 3 * 4": "2 * 3 * 4",
    "use `x*y` here": f"use {CODE}x*y{OFF} here",
    "# Title\ntext": f"{HEAD}Title{OFF}\ntext",
    "- one\n  * two\n-3": "• one\n  • two\n-3",
    "```py\n# no heading **x**\n```\nend": f"{DIM}```py{OFF}\n{CODE}# no heading **x**\n{DIM}```{OFF}\nend",
    "\x1b[31mred\x1b]0;title\x07": "\\x1b[31mred\\x1b]0;title\\x07",
}


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_markdown_is_the_same_however_it_comes(text: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    out = terminal.Coloured()
    for at in range(0, len(text), size):
        out.write(text[at : at + size])
    out.close()
    assert capsys.readouterr().out == f"{CASES[text]}{OFF}\n"


def test_a_terminal_without_colours_is_not_steered_either(capsys: pytest.CaptureFixture[str]) -> None:
    out = terminal.Visible()
    out.write("a\x1b[2J**b**\r\n")
    assert capsys.readouterr().out == "a\\x1b[2J**b**\\r\n"


def test_a_pipe_gets_what_the_model_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    out = terminal.writer()
    out.write("**a**\x1b[2J")
    assert isinstance(out, terminal.PlainWriter) and capsys.readouterr().out == "**a**\x1b[2J"
