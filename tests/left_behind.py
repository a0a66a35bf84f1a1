"""The state of the process that a file of tests must leave as it was: files run in any order, several in one process.

Looked at before the first test of a file and after the last one, when its fixtures are gone; what differs fails the
last test of the file, by name. Only what tests do is looked at: what a library does when it is first imported
(variables, handlers of the root logger, hooks, folders in sys.path) would fail whichever file comes first. Warning
filters are not here either: pytest puts them back after each test."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import itertools
import logging
import operator
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from quire.base.registry import Registry

State = dict[tuple[str, str], Any]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM,
           signal.SIGPIPE, signal.SIGWINCH]  # fmt: skip
OURS = ("quire", "vllm")
TABLES = frozenset(("quire.config.outside", "quire.base.plugins"))  # filled by those who register something
NEW_IS_FINE = frozenset(
    ("names of", "module", "logger", "torch", "kernels", "table", "kernel", "triton")
)  # with a module that is now imported
PATCHED_OFTEN: tuple[Any, ...] = (time, os, socket, builtins, threading, asyncio, subprocess, shutil)
# Of these, functions alone. Not of torch itself: it replaces some when its compiler is first imported.
FUNCTIONS_PATCHED_OFTEN = ("torch.nn.functional",)
ABSENT = object()
FUNCTIONS = (FunctionType, BuiltinFunctionType)
OUR_VARIABLES = ("QUIRE_", "VLLM_", "HF_", "OPENAI_", "OTEL_")
OUR_FOLDERS = (tempfile.gettempdir(), str(Path(__file__).parent))
PYDANTIC = "__pydantic_"  # names of a class that it fills in at first use
THREAD_PATIENCE_S = 30.0


def state_of_process() -> State:
    return {
        **{
            ("environment variable", name): value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
        },
        **{("handler of", one.name): signal.getsignal(one) for one in SIGNALS},
        ("process", "working directory"): os.getcwd(),
        ("process", "umask"): _umask(),
        ("process", "processors"): tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else (),
        **{("sys.path", folder): True for folder in sys.path},
        ("sys", "switch interval"): sys.getswitchinterval(),
        ("gc", "enabled"): gc.isenabled(),
        ("gc", "threshold"): gc.get_threshold(),
        **{("thread", _name(one)): True for one in threading.enumerate() if _counts(one)},
        **_loggers(),
        **_torch(),
        **_kernels(),
        **_triton(),
        **_modules(),
    }


def _name(thread: threading.Thread) -> str:
    return f"{thread.name} {thread.ident}"


def _counts(thread: threading.Thread) -> bool:
    """Daemons end with the process; litellm keeps a pool of threads for its log; a test's time is counted by one."""
    return not thread.daemon and not thread.name.startswith(("litellm-", "pytest_timeout"))


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _loggers() -> State:
    found: State = {}
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in OURS]:
        log = logging.getLogger(name)
        handlers = [one for one in log.handlers if not type(one).__module__.startswith("_pytest.")]
        found["logger", name] = (log.level, log.propagate, log.disabled, *map(id, handlers))
    found["logging", "disabled up to"] = logging.root.manager.disable
    return found


def _torch() -> State:
    """Not whether oneDNN is on: torch itself turns that off after the first bfloat16 matmul that it cannot do."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # or not imported to its end
        return {}
    return {
        ("torch", "threads"): torch.get_num_threads(),
        ("torch", "default dtype"): torch.get_default_dtype(),
        ("torch", "default device"): torch.get_default_device(),
        ("torch", "deterministic algorithms"): torch.are_deterministic_algorithms_enabled(),
        ("torch", "only warns of others"): torch.is_deterministic_algorithms_warn_only_enabled(),
        ("torch", "autocast"): torch.is_autocast_enabled("cpu"),
        ("torch", "anomalies"): torch.is_anomaly_enabled(),
        ("torch", "precision of matmul"): torch.get_float32_matmul_precision(),
        ("torch", "gradients"): torch.is_grad_enabled(),
        ("torch", "inference mode"): torch.is_inference_mode_enabled(),
    }


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """They would look again and again through what is made here: thousands of dictionaries."""
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


@_without_collections()
def _modules() -> State:
    """Which object each name of ours stands for: none of our modules rebinds a name of its own."""
    found: State = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OURS:
            found["module", name] = module
            if isinstance(module, ModuleType):
                found |= _names(module) | _plugins(module)
    for module in PATCHED_OFTEN:
        found |= _names(module)
    for name in FUNCTIONS_PATCHED_OFTEN:
        if (module := sys.modules.get(name)) is not None:
            found["names of", name] = {
                key: one for key, one in list(vars(module).items()) if key[0] != "_" and isinstance(one, FUNCTIONS)
            }
    return found


def _plugins(module: ModuleType) -> State:
    """Names that were registered; what the names stand for is loaded at first use."""
    tables = {name: one.names() for name, one in _holds(module).registries}
    if module.__name__ in TABLES:
        tables |= private_containers(module)
    return {("table", f"{module.__name__}.{name}"): tuple(sorted(map(str, table))) for name, table in tables.items()}


def private_containers(module: ModuleType) -> dict[str, Any]:
    """Sets and dictionaries of a module that its functions fill."""
    return {
        name: value
        for name, value in list(vars(module).items())
        if name.startswith("_") and not name.startswith("__") and name.islower() and type(value) in (set, dict)
    }


def _kernels() -> State:
    native = sys.modules.get("quire.ops.cpu.native")
    library = native and native.kernels()
    return {("kernels", "instruction set"): library.qc_isa()} if library else {}


def _triton() -> State:
    """The driver, and of each of our kernels what `launch.install` changes in it. With a GPU an engine changes both."""
    launch, runtime = sys.modules.get("quire.ops.triton.launch"), sys.modules.get("triton.runtime.driver")
    if launch is None or runtime is None or not hasattr(launch, "kernels_of"):  # or not imported to its end
        return {}
    if sys.modules["torch"].cuda.is_available():
        return {}
    found: State = {("triton", "driver"): vars(runtime.driver).get("_active")}
    for name in [name for name in sys.modules if name.startswith("quire.ops.triton.")]:
        for kernel in launch.kernels_of([sys.modules[name]]):
            aligned = tuple(bool(param.do_not_specialize_on_alignment) for param in kernel.params)
            found["kernel", f"{name}.{kernel.__name__}"] = (vars(kernel).get("run"), *aligned)
    return found


def _names(module: ModuleType) -> State:
    found: State = {("names of", module.__name__): vars(module).copy()}
    if module.__name__.partition(".")[0] in OURS:
        for name, value in _holds(module).classes:
            found["names of", name] = vars(value).copy()
    return found


class Holds(NamedTuple):
    """What is of interest in a module that has so many names; what a name stands for is looked at apart."""

    module: ModuleType
    num_names: int
    classes: list[tuple[str, type]]
    registries: list[tuple[str, Registry[Any]]]


_held: dict[str, Holds] = {}


def _holds(module: ModuleType) -> Holds:
    name, names = module.__name__, vars(module)
    known = _held.get(name)
    if known is None or known.module is not module or known.num_names != len(names):
        of_own = [(key, one) for key, one in names.items() if isinstance(one, type) and one.__module__ == name]
        classes = [(f"{name}.{key}", one) for key, one in of_own]
        registries = [(key, one) for key, one in names.items() if isinstance(one, Registry)]
        _held[name] = known = Holds(module, len(names), classes, registries)
    return known


@_without_collections()
def differences(before: State, after: State) -> list[str]:
    """What was there before and is something else now, and what is new where that can only be something left over."""
    out = []
    for key in before.keys() | after.keys():
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if (old is ABSENT and _is_others(*key)) or (new is ABSENT and key[0] == "thread"):
            continue
        if key[0] == "names of":
            now = {} if new is ABSENT else new
            if all(map(operator.is_, old.values(), map(now.get, old, itertools.repeat(ABSENT)))):
                continue
            out += [
                f"{key[1]}.{name}: {_show(one)} -> {_show(now.get(name, ABSENT))}"
                for name, one in old.items()
                if _differs(one, now.get(name, ABSENT)) and not name.startswith(PYDANTIC)
            ]
        elif old is not new and (key[0] == "module" or old != new):
            out.append(f"{key[0]} {key[1]}: {_show(old)} -> {_show(new)}")
    return sorted(out)


def _differs(old: object, new: object) -> bool:
    """Another object, unless both are the same plain value: `time.tzset` makes an equal tuple anew."""
    if old is new or type(old) is not type(new):
        return old is not new
    parts = old if isinstance(old, tuple) else (old,)
    return not all(isinstance(part, str | bytes | int | float | None) for part in parts) or old != new


def _is_others(kind: str, name: str) -> bool:
    """Of something new: whether it came with a module that is now imported."""
    if kind == "environment variable":
        return not name.startswith(OUR_VARIABLES)
    return kind in NEW_IS_FINE or (kind == "sys.path" and not name.startswith(OUR_FOLDERS))


def _let_threads_end(before: State) -> None:
    """Those that are at their end are not left behind."""
    until = time.monotonic() + THREAD_PATIENCE_S
    for thread in threading.enumerate():
        if _counts(thread) and ("thread", _name(thread)) not in before and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def _show(value: Any) -> str:
    return "absent" if value is ABSENT else repr(value)[:200]


class LeftBehind:
    """The plug-in: one look per file."""

    def __init__(self) -> None:
        self.before: State = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if not self.before:
            self.before = state_of_process()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if nextitem is not None and _file(nextitem) == _file(item):
            return
        _let_threads_end(self.before)
        before, self.before = self.before, state_of_process()  # nothing runs between two files
        if changed := differences(before, self.before):
            pytest.fail(f"{_file(item)} leaves behind:\n  " + "\n  ".join(changed), pytrace=False)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
