"""tests/left_behind.py: a file of tests that changes its process for others fails, and the failure names the change."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire.base.clock
from quire.base.log import logger
from quire.base.procs import Child
from quire.config.outside import ModelRegistry, _registered
from tests.left_behind import differences, state_of_process

ROOT = Path(__file__).parents[3]


def _swap(owner: object, name: str) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, lambda *args: None)
    return lambda: setattr(owner, name, before)


def _variable() -> Callable[[], None]:
    os.environ["QUIRE_LEFT"] = "1"
    return lambda: os.environ.pop("QUIRE_LEFT")


def _level() -> Callable[[], None]:
    log = logger("quire")
    before = log.level
    log.setLevel(logging.CRITICAL)
    return lambda: log.setLevel(before)


def _signal() -> Callable[[], None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


def _folder() -> Callable[[], None]:
    before = os.getcwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def _path() -> Callable[[], None]:
    folder = f"{tempfile.gettempdir()}/left"
    sys.path.append(folder)
    return lambda: sys.path.remove(folder)


def _module() -> Callable[[], None]:
    before = sys.modules["quire.base.clock"]
    sys.modules["quire.base.clock"] = type(sys)("quire.base.clock")
    return lambda: sys.modules.__setitem__("quire.base.clock", before)


def _plugin() -> Callable[[], None]:
    ModelRegistry.register_model("LeftForCausalLM", "left:Model")
    return lambda: _registered.pop("LeftForCausalLM")


def _thread() -> Callable[[], None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()
    return lambda: (end.set(), thread.join())


CHANGES: dict[str, Callable[[], Callable[[], None]]] = {
    "environment variable QUIRE_LEFT": _variable,
    "logger quire": _level,
    "handler of SIGUSR1": _signal,
    "process working directory": _folder,
    f"sys.path {tempfile.gettempdir()}/left": _path,
    "module quire.base.clock": _module,
    "quire.base.clock.now": lambda: _swap(quire.base.clock, "now"),
    "quire.base.procs.Child.wait": lambda: _swap(Child, "wait"),
    "table quire.config.outside._registered": _plugin,
    "thread left": _thread,
}


@pytest.fixture
def undone() -> Iterator[list[Callable[[], None]]]:
    steps: list[Callable[[], None]] = []
    yield steps
    for step in steps:
        step()


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_named(what: str, undone: list[Callable[[], None]]) -> None:
    before = state_of_process()
    assert differences(before, state_of_process()) == []
    undone.append(CHANGES[what]())
    changed = differences(before, state_of_process())
    assert any(line.startswith(what) for line in changed), changed


def test_a_change_of_torch_is_named() -> None:
    torch = pytest.importorskip("torch")
    before, dtype = state_of_process(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert differences(before, state_of_process()) == ["torch default dtype: torch.float32 -> torch.float64"]
    finally:
        torch.set_default_dtype(dtype)


def test_a_launcher_on_a_kernel_is_named() -> None:
    """Those of a dry run once stayed, and counted in the next file."""
    pytest.importorskip("triton")
    launch, norm = pytest.importorskip("quire.ops.triton.launch"), pytest.importorskip("quire.ops.triton.norm")
    kernels = launch.kernels_of([norm])
    if not kernels or pytest.importorskip("torch").cuda.is_available():
        pytest.skip("kernels are interpreted, or their launchers an engine's")
    before = state_of_process()
    vars(kernels[0])["run"] = print
    try:
        changed = differences(before, state_of_process())  # in every module that imports it
        assert any(line.startswith(f"kernel quire.ops.triton.norm.{kernels[0].__name__}") for line in changed)
    finally:
        del vars(kernels[0])["run"]
    kernels[0].params[0].do_not_specialize_on_alignment ^= True
    try:
        assert differences(before, state_of_process())
    finally:
        kernels[0].params[0].do_not_specialize_on_alignment ^= True
    assert not differences(before, state_of_process())


def test_a_function_of_a_library_is_named(undone: list[Callable[[], None]]) -> None:
    torch = pytest.importorskip("torch")
    before = state_of_process()
    undone.append(_swap(torch.nn.functional, "linear"))
    undone.append(_swap(subprocess, "run"))
    changed = [line.partition(":")[0] for line in differences(before, state_of_process())]
    assert changed == ["subprocess.run", "torch.nn.functional.linear"]


def test_the_file_that_leaves_something_behind_fails_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_a.py").write_text(
        "import os, random\n"
        "def test_leaves():\n"
        "    os.environ['QUIRE_LEFT'] = os.environ['OTHERS'] = '1'\n"
        "    test_leaves.drawn = random.random()\n"
        "def test_draws_the_same(): assert random.random() == test_leaves.drawn\n"
    )
    (tmp_path / "test_b.py").write_text(
        "import os\ndef test_innocent(monkeypatch): assert 'QUIRE_LEFT' in os.environ; monkeypatch.setenv('B', '1')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_a.py", "test_b.py"]
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False, timeout=300)
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert "test_a.py leaves behind:\n  environment variable QUIRE_LEFT: absent -> '1'" in done.stdout


def test_an_equal_value_made_anew_is_no_change() -> None:
    before = state_of_process()
    time.tzset()
    assert not differences(before, state_of_process())
