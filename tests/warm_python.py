"""Programs run by an interpreter that has torch imported already: a fork per program, instead of seconds of imports.

Only packages of others are imported beforehand (WARM). Each program imports Quire itself, in its own order, with its
own arguments, environment, folder and standard streams, and ends as any interpreter does: with its exit handlers, and
with a traceback and exit code 1 where it raises. What differs from a process of its own: the imports of WARM, and the
seed of hashes, which all forks share. Files that use it run at least one program of each kind in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

WARM = ("torch", "numpy", "safetensors.torch", "tokenizers", "msgspec", "jinja2", "zmq", "yaml", "tqdm", "asyncio")
OURS = ("quire", "vllm", "tests")


class WarmPython:
    """The interpreter, as those who start programs see it. One program at a time."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from tests import warm_python as w; "
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code + "w.serve() and w.run()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(
        self,
        program: str | Path,
        *arguments: str,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, ...)` would."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        with tempfile.TemporaryDirectory(prefix="quire-warm-") as folder:
            streams = [os.path.join(folder, name) for name in ("out", "err")]
            order = {"argv": [str(program), *arguments], "env": dict(env), "cwd": str(cwd or os.getcwd())}
            pipes[0].write(json.dumps({**order, "streams": streams}).encode() + b"\n")
            pipes[0].flush()
            if not select.select([pipes[1]], [], [], timeout)[0]:
                self.close()
                raise subprocess.TimeoutExpired([str(program), *arguments], timeout)
            answer = pipes[1].readline()
            assert answer, "the warm interpreter is gone"
            texts = [Path(stream).read_text() for stream in streams]
        return subprocess.CompletedProcess([str(program), *arguments], int(answer), *texts)

    def close(self) -> None:
        """Ends it, and with it whatever a program left running in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# ---- within the interpreter ----------------------------------------------------------------------------------------

_order: dict[str, Any] = {}


def serve() -> bool:
    """Forks for each order. True in a fork, which has `_order` to run; False at the end."""
    for name in WARM:
        importlib.import_module(name)
    if early := {name.partition(".")[0] for name in sys.modules} & {"quire", "vllm"}:
        raise RuntimeError(f"a program imports these itself, but they are here: {early}")
    for line in iter(sys.stdin.readline, ""):
        if (child := os.fork()) == 0:
            _order.update(json.loads(line))
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)
    return False


def run() -> None:
    """The program of `_order`, as the main module of this process."""
    for number, name in enumerate((os.devnull, *_order["streams"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(_order["env"])
    os.chdir(_order["cwd"])
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    program: str = _order["argv"][0]
    sys.argv = _order["argv"]
    sys.path[:2] = [os.path.dirname(os.path.abspath(program))]  # in place of "" and the repository
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)
