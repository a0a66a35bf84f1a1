"""cli/main.py and cli/tools.py: the table, help, versions, and how errors leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.base import env
from quire.base.registry import load
from quire.cli import main as cli
from quire.cli.dispatch import Command
from quire.cli.main import COMMANDS
from quire.schema.errors import InputError, ModelNotFoundError


@pytest.fixture(autouse=True)
def _called_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/quire"])


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_lists_every_command_and_only_those(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    block = capsys.readouterr().out.split("commands:\n")[1].split("\n\n")[0]
    listed = [line.split()[0] for line in block.splitlines()]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    assert callable(load(COMMANDS[name].path))


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"{quire.__version__}\n"


@pytest.mark.parametrize(
    "name, says",
    [
        ("chta", "did you mean 'chat'?"),
        (
            "nonsense",
            "unknown command 'nonsense'. Commands: serve, chat, run, complete, pull, list, bench, simulate, "
            "run-batch, launch, collect-env",
        ),
    ],
)
def test_unknown_commands(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and not printed.out


def fail_input(arguments: list[str], program: str) -> int:
    raise InputError(f"{arguments[0]} is wrong")


def fail_model(arguments: list[str], program: str) -> int:
    raise ModelNotFoundError("no such model")


def fail_bug(arguments: list[str], program: str) -> int:
    raise ZeroDivisionError


def interrupt(arguments: list[str], program: str) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "function, status, says",
    [
        (fail_input, 1, "quire test: --x is wrong\n"),
        (fail_model, 1, "quire test: no such model\n"),
        (interrupt, 130, ""),
    ],
)
def test_an_error_is_one_line(
    function: object, status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.dispatch.load", lambda path: function)
    monkeypatch.setitem(COMMANDS, "test", Command("anywhere", "a test"))
    assert cli.main(["test", "--x"]) == status
    assert capsys.readouterr().err == says


def test_a_wrong_environment_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "much")
    env.forget_all()
    assert cli.main(["collect-env"]) == 1
    said = capsys.readouterr().err
    assert "QUIRE_CPU_KVCACHE_SPACE='much'" in said and said.count("\n") == 1


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.dispatch.load", lambda path: fail_bug)
    monkeypatch.setitem(COMMANDS, "test", Command("anywhere", "a test"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["test"])


def in_shell(redirected: str, command: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`quire` with standard streams as the shell's words have them."""
    program = f'exec "$0" -P -c "$1" {command} {redirected}'
    code = "import sys; from tests.plain.cli.test_main import run; sys.exit(run())"
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    surrounding = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["sh", "-c", program, sys.executable, code], capture_output=True, text=True, timeout=300,
        env=surrounding | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


def run() -> int:
    """The command, with one more that writes to both streams and says how it finds them."""
    COMMANDS["test"] = Command("tests.plain.cli.test_main:speak", "a test")
    return cli.main()


def speak(arguments: list[str], program: str) -> int:
    print("said: \u65e5")
    print("loading", file=sys.stderr)
    with open(os.devnull) as opened:
        return 5 if opened.fileno() > 2 and sys.stdin.read() == "" else 6


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_output_that_is_full_is_one_line(unbuffered: str) -> None:
    done = in_shell(">/dev/full", "--version", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("cannot write: No space left on device\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "closed, out, err",
    [("2>&- <&-", "said: \u65e5\n", ""), (">&- <&-", "", "loading\n"), ("<&- >&- 2>&-", "", "")],
)
def test_closed_streams_are_the_null_device(closed: str, out: str, err: str) -> None:
    done = in_shell(closed, "test")
    assert (done.returncode, done.stdout, done.stderr) == (5, out, err)


def test_what_the_encoding_lacks_is_escaped() -> None:
    done = in_shell("</dev/null", "test", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (5, "said: \\u65e5\n", "loading\n")


def test_collect_env_shows_versions_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show_me")
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "1.5")
    assert cli.main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in printed.splitlines() if len(line.split()) > 1}
    assert rows["quire-llm"] == quire.__version__
    assert rows["CPU_KVCACHE_SPACE"] == "1.5"
    assert rows["HF_TOKEN"] == "(set, not shown)"
    assert "hf_do_not_show_me" not in printed
    assert {"Python", "torch", "msgspec", "memory"} <= set(rows)


def test_collect_env_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.cli import tools

    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert tools.memory() == "unknown"
    assert "(" in tools.cpu_name()
    assert tools._field(str(Path(__file__)), "anything") is None
