"""Programs and engine processes run by an interpreter that has torch imported already: a fork for each, instead of
seconds of imports.

Only packages of others are imported beforehand (WARM). Each fork imports Quire itself, in its own order, with its own
arguments, environment, folder and standard streams, and ends as any interpreter does: with its exit handlers, and with
a traceback and exit code 1 where it raises. What differs from a process of its own: the imports of WARM, the seed of
hashes, which all forks share, that modules are not taken apart at the end, which takes a second with those of
transformers, and its parent, which is the interpreter: processes that a fork starts through quire.base.procs are forks
beside it. Files that use it run at least one program of each kind in a process of its own.

With FORKED_TESTS=1 the processes of a test run (pytest-xdist) are forks of one such interpreter too, which has more
imported (TESTED), and those interpreters that they need themselves are forks of the first, which has not.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

WARM = ("torch", "numpy", "safetensors.torch", "tokenizers", "msgspec", "jinja2", "zmq", "yaml", "tqdm", "asyncio",
        "fastapi", "pydantic", "uvicorn", "uvloop", "httptools")  # fmt: skip
# What tests import while they are collected, two thirds of that time.
TESTED = ("torch.distributed.tensor", "transformers.conversion_mapping", "transformers.modeling_utils", "sympy",
          "openai", "huggingface_hub")  # fmt: skip
OURS = ("quire", "vllm", "tests")
FILE = __file__
SHARED = "WARM_PYTHON"  # the variable that tells processes of a test run where the first interpreter listens
PROCS = "quire.base.procs"
# What an interpreter or a library of WARM reads once: with other values a process is one of its own.
READ_ONCE = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ATEN_", "TORCH_", "MALLOC_", "LD_", "CUDA_", "PYTHON")
NOT_READ = "PYTHONPATH"  # the command sets sys.path


class Elsewhere:
    """Of forks that work for this process and that nobody else counts: those that run, and the time of others."""

    running: set[int] = set()
    seconds = 0.0


class WarmPython:
    """The interpreter, as those who start programs see it."""

    def __init__(self, within: str | None = None, more: tuple[str, ...] = ()) -> None:
        """`within`: the address of an interpreter, which this one is a fork of, with `more` imported."""
        self.address = f"quire-warm-{os.getpid()}-{id(self)}"
        self._process = self._within(within, more) if within else self._started()
        assert self._process.stdout is not None
        told = self._process.stdout.readline().removeprefix(b"listening ")
        self._known: dict[str, str] = json.loads(told)

    def _started(self) -> subprocess.Popen[bytes]:
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from tests import warm_python as w; "
        )
        return subprocess.Popen(
            [sys.executable, "-c", code + f"w.serve({self.address!r}) and w.run()"],
            stdin=subprocess.PIPE,  # its end is that of this process: the interpreter ends too
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _within(self, address: str, more: tuple[str, ...]) -> Fork:
        (theirs, ours), (reading, writing) = os.pipe(), os.pipe()
        order = {"serve": self.address, "more": more, "env": dict(os.environ), "cwd": os.getcwd()}
        try:
            fork = Fork(address, order, {0: theirs, 1: writing, 2: 2}, stdin=ours, elsewhere=True)
        finally:
            os.close(theirs)
            os.close(writing)
        fork.stdout = os.fdopen(reading, "rb")
        return fork

    def run(
        self,
        program: str | Path,
        *arguments: str,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        timeout: float,
        more: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, ...)` would.
        `more`: what the interpreter shall have imported for this program and those after it, beside WARM."""
        argv = [str(program), *arguments]
        if _read_once(env) != self._known:
            command = [sys.executable, *argv]
            return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout)
        with contextlib.ExitStack() as stack:
            null, out, err = stack.enter_context(open(os.devnull)), *(
                stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)
            )  # fmt: skip
            fork = Fork(self.address, {"argv": argv, "env": dict(env), "cwd": str(cwd or os.getcwd()), "more": more},
                        {0: null.fileno(), 1: out.fileno(), 2: err.fileno()})  # fmt: skip
            try:
                fork.wait(timeout)
            except subprocess.TimeoutExpired:
                self.close()
                raise
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode())
        return subprocess.CompletedProcess(argv, fork.returncode or 0, *texts)

    def start(self, program: str | Path, *arguments: str, env: Mapping[str, str]) -> Fork:
        """As `subprocess.Popen([sys.executable, program, *arguments], stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE,
        text=True, env=env)` would."""
        assert _read_once(env) == self._known, "it needs an interpreter of its own"
        reading, writing = os.pipe()
        with open(os.devnull, "r+b") as null, os.fdopen(writing, "wb") as err:
            order = {"argv": [str(program), *arguments], "env": dict(env), "cwd": os.getcwd()}
            fork = Fork(self.address, order, {0: null.fileno(), 1: null.fileno(), 2: err.fileno()})
        fork.stderr = os.fdopen(reading)
        return fork

    @staticmethod
    def start_apart(address: str, code: str, *arguments: str, env: Mapping[str, str], cwd: str | Path) -> Fork | None:
        """As `subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=DEVNULL, stderr=PIPE, text=True,
        env=env, cwd=cwd, start_new_session=True)` would, with processes of its own that are its children. None, if it
        needs an interpreter of its own."""
        if _read_once(env) != _read_once(os.environ):
            return None
        reading, writing = os.pipe()
        order = {"code": code, "argv": arguments, "apart": True, "env": dict(env), "cwd": str(cwd)}
        with open(os.devnull, "r+b") as null, os.fdopen(writing, "wb") as err:
            fork = Fork(address, order, {0: null.fileno(), 1: null.fileno(), 2: err.fileno()}, elsewhere=True)
        fork.stderr = os.fdopen(reading)
        return fork

    @contextlib.contextmanager
    def runs_children(self) -> Iterator[None]:
        """Meanwhile what this process starts through quire.base.procs is a fork of the interpreter."""
        procs = importlib.import_module(PROCS)
        before = procs.subprocess
        procs.subprocess = _commands(self.address, self._known)
        try:
            yield
        finally:
            procs.subprocess = before

    def close(self) -> None:
        """Ends it, and with it whatever a program left running in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Fork:
    """A running fork, with the names of subprocess.Popen. Its parent, the interpreter, tells how it ended."""

    def __init__(
        self,
        address: str,
        order: dict[str, Any],
        streams: Mapping[int, int],
        stdin: int = -1,
        *,
        elsewhere: bool = False,
    ) -> None:
        """`streams`: descriptors of the fork and what they are here. `stdin`: of a pipe that is its standard input.
        `elsewhere`: the interpreter did not come from this process."""
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb") if stdin >= 0 else None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[str] | None = None
        self.returncode: int | None = None
        self._reading = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(f"\0{address}")  # a name without a file
        text = json.dumps({**order, "targets": [*streams]}).encode()
        socket.send_fds(self._line, [len(text).to_bytes(8, "little")], [*streams.values()])
        self._line.sendall(text)
        self.pid = int.from_bytes(self._line.recv(8), "little")
        assert self.pid, "the warm interpreter is gone"
        if elsewhere:
            Elsewhere.running.add(self.pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._line], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        with self._reading:
            if self.returncode is None:
                told = self._line.recv(16)
                self.returncode = int.from_bytes(told[:8], "little", signed=True) if told else -signal.SIGKILL
                self._line.close()
                if self.pid in Elsewhere.running:
                    Elsewhere.running.remove(self.pid)
                    Elsewhere.seconds += int.from_bytes(told[8:], "little") / 1e6
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _read_once(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_ONCE) and name != NOT_READ}


def _commands(address: str, known: Mapping[str, str]) -> SimpleNamespace:
    """In place of the module `subprocess` within quire.base.procs. `known`: what the interpreter has read once."""
    processors, priority = os.sched_getaffinity(0), os.nice(0)

    def start(
        command: Sequence[str], *, stdin: int, pass_fds: tuple[int, ...], env: dict[str, str]
    ) -> Fork | subprocess.Popen[bytes]:
        interpreter, *flags, code = command
        same = _read_once(env) == known and os.sched_getaffinity(0) == processors and os.nice(0) == priority
        if not same or (interpreter, flags, stdin) != (sys.executable, ["-P", "-c"], subprocess.PIPE):
            return subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds, env=env)
        reading, writing = os.pipe()
        try:
            streams = {0: reading, 1: 1, 2: 2, **{number: number for number in pass_fds}}
            return Fork(address, {"code": code, "env": env, "cwd": os.getcwd()}, streams, writing)
        finally:
            os.close(reading)

    return SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)


# ---- within the interpreter ----------------------------------------------------------------------------------------

_order: dict[str, Any] = {}


def serve(address: str) -> bool:
    """Forks for each order. True in a fork, which has `_order` to run. Ends, with all forks, when standard input does:
    with whoever started it."""
    known = _read_once(os.environ)
    atexit.register(_leave)  # before all others, so it comes after them
    _import(WARM)
    if early := {name.partition(".")[0] for name in sys.modules} & {"quire", "vllm"}:
        raise RuntimeError(f"a program imports these itself, but they are here: {early}")
    _fork_for_orders(address, known)
    while "serve" in _order:
        os.setsid()
        _surround()
        _import(_order["more"])
        _fork_for_orders(_order["serve"], known)
    return True


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork_for_orders(address: str, known: dict[str, str]) -> None:
    """Returns in a fork, with `_order`."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen(64)
    waker, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("listening", json.dumps(known), flush=True)
    lines: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listening, waker, 0], [], [])[0]
        if 0 in ready:
            os.killpg(0, signal.SIGKILL)
        if waker in ready:
            os.read(waker, 1024)
            _tell_ends(lines)
        if listening in ready:
            line, _ = listening.accept()
            order, descriptors = _read_order(line)
            if not order:
                line.close()
                continue
            more = () if "serve" in order else order.get("more", ())
            if missing := [name for name in more if name not in sys.modules]:
                _import(missing)
            if (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _order.clear()
                _order.update(order, address=address, known=known)
                for ours in (listening, line, *lines.values()):
                    ours.detach()  # the number will be another's
                _take(dict(zip(order["targets"], descriptors, strict=True)))
                return
            for descriptor in descriptors:
                os.close(descriptor)
            lines[child] = line
            line.sendall(child.to_bytes(8, "little"))


def _read_order(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Empty, if whoever wanted it is gone."""
    head, descriptors, _, _ = socket.recv_fds(line, 8, 64)
    length, text = int.from_bytes(head, "little"), b""
    while len(text) < length:
        if not (more := line.recv(length - len(text))):
            break
        text += more
    if text and len(text) == length:
        return json.loads(text), descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return {}, []


def _tell_ends(lines: dict[int, socket.socket]) -> None:
    while lines:
        child, status, used = os.wait4(-1, os.WNOHANG)
        if not child:
            return
        line, microseconds = lines.pop(child), int((used.ru_utime + used.ru_stime) * 1e6)
        with contextlib.suppress(OSError):  # nobody waits for it
            told = os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True)
            line.sendall(told + microseconds.to_bytes(8, "little"))
        line.close()


def _take(descriptors: dict[int, int]) -> None:
    """Descriptors under their own numbers, and no others."""
    high = max(*descriptors, *descriptors.values()) + 1
    moved = {target: fcntl.fcntl(source, fcntl.F_DUPFD, high) for target, source in descriptors.items()}
    kept = {0, 1, 2, *moved.values()}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
    for target, source in moved.items():
        os.dup2(source, target)
        os.close(source)


def run() -> None:
    """The program of `_order`, as the main module of this process."""
    _surround()
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    if _order.get("apart"):
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        sys.meta_path.insert(0, _ForksOfForks())
    program: str = "-c" if "code" in _order else _order["argv"][0]
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    if "code" in _order:
        sys.argv = [program, *_order.get("argv", ())]
        sys.path[:1] = []  # as with -P
        code = _order["code"]
    else:
        sys.argv = _order["argv"]
        sys.path[:2] = [os.path.dirname(os.path.abspath(program))]  # in place of "" and the repository
        main.__dict__["__file__"] = program
        code = Path(program).read_bytes()
    try:
        exec(compile(code, program, "exec", dont_inherit=True), main.__dict__)  # nothing of our own __future__
    except SystemExit as end:
        _order["status"] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        _order["status"] = 1
        raise
    _order["status"] = 0


def _surround() -> None:
    os.environ.clear()
    os.environ.update(_order["env"])
    os.chdir(_order["cwd"])


def _leave() -> None:
    """The last exit handler of a fork: spares it what is left of the interpreter's end, which visits every object.
    Where a stream cannot be written, and after Ctrl-C, the interpreter knows the exit code."""
    status: int | None = _order.get("status")
    if status is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(status & 0xFF)


class _ForksOfForks(importlib.abc.MetaPathFinder):
    """Finds quire.base.procs where others do, and has its processes started by the interpreter."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PROCS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.__dict__["subprocess"] = _commands(_order["address"], _order["known"])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def stand_in(address: str, *command: str) -> int:
    """`python warm_python.py ADDRESS ... -c CODE` is to whoever starts it `python ... -c CODE`: it waits for a fork of
    the interpreter at ADDRESS that has its standard streams."""
    order = {"code": command[-1], "env": dict(os.environ), "cwd": os.getcwd()}
    return Fork(address, order, {0: 0, 1: 1, 2: 2}).wait()


if __name__ == "__main__":
    sys.exit(stand_in(*sys.argv[1:]) & 0xFF)
