"""A fork of the warm interpreter is to a program what an interpreter of its own would be (tests/warm_python.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.base.procs import PARENT_GONE, Child
from tests.warm_python import FILE, TESTED, Elsewhere, WarmPython, _read_once

PROGRAM = """
import atexit, os, sys
print([name for name in ("quire", "vllm", "tests", "torch", "tests.warm_python") if name in sys.modules])
print(sys.argv[1:], os.environ.get("GIVEN"), os.environ.get("HOME"), os.getcwd(), sys.stdin.read() == "")
print(sys.path[0] == os.path.dirname(__file__), __name__, sys.modules["__main__"].PROGRAM)
def one(given: int) -> None: ...
print(one.__annotations__["given"])
atexit.register(print, "left")
sys.stderr.write("said\\n")
""".replace("print(sys.path", "PROGRAM = 'mine'\nprint(sys.path")


def test_a_program_sees_what_it_is_given_and_nothing_of_ours(warm_python: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = {"GIVEN": "x", "PATH": os.environ["PATH"], **_read_once(os.environ)}
    done = warm_python.run(program, "a", "b c", env=given, cwd=tmp_path, timeout=60)
    assert done.stdout.splitlines() == [
        "['torch']", f"['a', 'b c'] x None {tmp_path} True", "True __main__ mine", "<class 'int'>", "left",
    ]  # fmt: skip
    assert (done.stderr, done.returncode) == ("said\n", 0)
    again = warm_python.run(program, env=given, cwd=tmp_path, timeout=60)
    assert again.stdout.splitlines()[1].startswith("[] x")


ENDS = ["raise ValueError('no')", "import sys; sys.exit(3)", "import sys; sys.exit('why')", "import sys; sys.exit(-1)",
        "raise KeyboardInterrupt", "import sys; sys.stdout.close(); sys.exit(3)"]  # fmt: skip


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_in_an_interpreter_of_its_own(warm_python: WarmPython, tmp_path: Path, code: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    done = warm_python.run(program, env=os.environ, timeout=60)
    own = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == own.returncode != 0
    said = done.stderr.partition("nanobind: leaked")[0]  # by Triton, if an earlier program had it imported beforehand
    assert said.splitlines()[-1:] == own.stderr.splitlines()[-1:]


LAST = """
import sys, threading, time, weakref
class Thing: ...
thing = Thing()
weakref.finalize(thing, print, "finalized")
threading.Thread(target=lambda: time.sleep(0.1) or print("waited for")).start()
sys.stdout.write("unfinished line ")
"""


def test_threads_finalizers_and_buffers_have_their_turn_before_the_end(warm_python: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAST)
    done = warm_python.run(program, env=os.environ, timeout=60)
    assert (done.stdout, done.returncode) == ("unfinished line waited for\nfinalized\n", 0)


def test_a_signal_is_told_and_the_next_one_runs(warm_python: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os; os.kill(os.getpid(), 9)")
    assert warm_python.run(program, env=os.environ, timeout=60).returncode == -signal.SIGKILL
    program.write_text("print(1)")
    assert warm_python.run(program, env=os.environ, timeout=60).stdout == "1\n"


def test_what_torch_reads_once_is_that_of_the_program(warm_python: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch; print(torch.get_num_threads())")
    for count in ("1", "3"):
        env = os.environ | {"OMP_NUM_THREADS": count}
        own = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=120)
        assert warm_python.run(program, env=env, timeout=120).stdout == own.stdout


OWNER = """
import os
from tests.warm_python import WarmPython
made = WarmPython()
print(made._process.pid, flush=True)
os._exit(0)
"""


def test_the_interpreter_ends_with_its_owner() -> None:
    done = subprocess.run([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, timeout=120)
    path = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError):
            if path.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return
    raise AssertionError("the interpreter is still there")


def test_an_interpreter_within_another_has_more_and_ends_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print('poplib' in sys.modules, 'torch' in sys.modules, 'tests' in sys.modules)")
    outer = WarmPython()
    inner = WarmPython(outer.address, ("poplib",))
    assert inner._process.pid in Elsewhere.running
    assert inner.run(program, env=os.environ, timeout=60).stdout == "True True False\n"
    assert outer.run(program, env=os.environ, timeout=60).stdout == "False True False\n"
    inner.close()
    assert not _runs(Path(f"/proc/{inner._process.pid}/stat")) and inner._process.pid not in Elsewhere.running
    assert outer.run(program, env=os.environ, timeout=60).returncode == 0
    outer.close()


def test_a_command_may_stand_for_a_fork(warm_python: WarmPython) -> None:
    """As pytest-xdist starts its processes."""
    code = "import sys; print('torch' in sys.modules, sys.stdin.readline(), end=''); sys.exit(3)"
    command = [sys.executable, FILE, warm_python.address, "-u", "-c", code]
    done = subprocess.run(command, input="a line\n", capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("True a line\n", "", 3)


APART = """
import os, signal, subprocess, sys, time
print(sys.argv[1:], os.getsid(0) == os.getpid(), "torch" in sys.modules, "quire" in sys.modules, file=sys.stderr)
child = subprocess.Popen(["sleep", "600"])
print(child.pid, file=sys.stderr, flush=True)
until = time.process_time() + 0.2
while time.process_time() < until: pass
child.wait()
"""


def test_a_server_is_the_parent_of_its_processes_and_its_time_is_counted(warm_python: WarmPython) -> None:
    before = Elsewhere.seconds
    fork = WarmPython.start_apart(warm_python.address, APART, "a", "b c", env=os.environ, cwd="/")
    assert fork is not None and fork.stderr is not None and fork.pid in Elsewhere.running
    assert fork.stderr.readline() == "['a', 'b c'] True True False\n"
    child = int(fork.stderr.readline())
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(fork.pid)
    os.kill(child, signal.SIGKILL)
    assert fork.wait(60) == 0 and fork.pid not in Elsewhere.running
    fork.stderr.close()
    assert Elsewhere.seconds - before > 0.15
    assert WarmPython.start_apart("nobody", APART, env=os.environ | {"OMP_NUM_THREADS": "7"}, cwd="/") is None


def test_processes_of_a_run_are_forks() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or "coverage" in sys.modules or os.environ.get("FORKED_TESTS") != "1":
        pytest.skip("the processes of this run are no forks: FORKED_TESTS=1 makes them so")
    interpreter = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    assert "warm_python" in interpreter and set(TESTED) <= set(sys.modules)


CHILD = """
import os, sys
from quire.base.procs import Child
def main(boot):
    if boot == b"nested":
        inner = Child("child:main", b"inner", name="inner")
        assert inner.wait(60)
        sys.exit(10 + inner.exit_code)
    print(boot.decode(), "torch" in sys.modules, os.environ.get("GIVEN"), flush=True)
    sys.exit(3)
"""


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("warm_children", "child_module")
def test_children_are_forks_and_so_are_theirs(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("GIVEN", "x")
    for boot, code in ((b"alone", 3), (b"nested", 13)):
        child = Child("child:main", boot, name="one")
        assert child.wait(60) and child.exit_code == code
        child.close()
    assert capfd.readouterr().out == "alone True x\ninner True x\n"


@pytest.mark.usefixtures("warm_children", "child_module")
def test_children_hear_signals_and_the_end_of_their_parent(capfd: pytest.CaptureFixture[str]) -> None:
    killed, left = (Child("child:main", None, name="one") for _ in range(2))
    killed.signal(signal.SIGKILL)
    assert killed.wait(60) and "SIGKILL" in killed.why_dead()
    left.close()
    assert left.exit_code == PARENT_GONE
    killed.close()


@pytest.mark.usefixtures("warm_children", "child_module")
def test_what_torch_reads_once_makes_a_process_of_its_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    child = Child("child:main", b"own", name="one")
    assert child.wait(60)
    child.close()
    assert capfd.readouterr().out == "own False None\n"


def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    python = WarmPython()
    state = Path(f"/proc/{python.run(program, env=os.environ, timeout=60).stdout.strip()}/stat")
    assert _runs(state)
    python.close()
    until = time.monotonic() + 60
    while _runs(state) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(state)


def _runs(state: Path) -> bool:
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
