"""Launching kernels from Python in a few microseconds, and recording them without launching.

Triton binds, specializes and looks up every argument at every launch. A Launcher replaces a kernel's
`run`: it reads only what Triton may specialize on (dtypes, alignment of addresses, values of integers), looks up the
compiled kernel by that and calls its C stub, with plain addresses, which the stub does not have to inspect.
Unknown launches take Triton's own path, and so do special ones: hooks, scratch memory.

    kernel[grid](...) ──▶ Launcher ── known ──▶ C stub
                             └── new, or recording ──▶ JITFunction.run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.base.log import logger
from quire.ops.triton.cache_keys import settle

_MOST_KNOWN = 4096  # of one kernel; more means that an integer changes with every launch
# Integer lists, of which a step's inputs and work lists are slices: a slice may start anywhere, and a kernel reads a
# few values of it, so its alignment gains nothing and must not require another kernel.
LISTS = frozenset((
    "contexts", "counts", "end", "index", "info", "items", "members", "merges", "order", "positions", "row_index",
    "rows", "slots", "starts", "tile_expert", "tile_start",
))  # fmt: skip
_SMALL = 1 << 31
DESCRIPTORS: set[type] = {TensorDescriptor}  # kernels of another kind may add their own
_log = logger(__name__)
Read = Callable[..., tuple[tuple, tuple]]  # arguments -> (specialization key, arguments of the stub)
Ready = tuple[Callable[..., None], int, bool, bool, Any, tuple]  # stub, function, its launch options, further arguments


class Launcher:
    def __init__(self, kernel: JITFunction, stream: Callable[[], int]) -> None:
        self.kernel, self._stream = kernel, stream
        self._is_settled = False
        self._readers: dict[tuple, tuple[Read | None, dict[tuple, Ready]]] = {}  # by the types of the arguments
        self._noted: set[tuple] | None = None  # while recording: launches passed on to Triton

    def record(self, on: bool) -> None:
        """While it is on, nothing is launched, and Triton sees only the first of equal launches."""
        self._noted = set() if on else None

    def _slow(self, *args: Any, **named: Any) -> Any:
        """Triton's own way."""
        if not self._is_settled:
            settle(self.kernel)
            self._is_settled = True
        return JITFunction.run(self.kernel, *args, **named)

    def __call__(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kinds = tuple(map(type, args))
        reader = self._readers.get(kinds)
        if reader is None:
            reader = self._readers[kinds] = self._reader(kinds)
        read, known = reader
        if warmup or self._noted is not None:
            if read is not None and self._noted is not None:
                launch = kinds, read(*args)[0], tuple(named), tuple(named.values())
                if launch in self._noted:
                    return None
                self._noted.add(launch)
            return self._slow(*args, grid=grid, warmup=True, **named)
        runtime = knobs.runtime
        if read is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return self._slow(*args, grid=grid, warmup=False, **named)
        key, passed = read(*args)
        key = key, tuple(named), tuple(named.values())
        if (ready := known.get(key)) is None:
            made = self._slow(*args, grid=grid, warmup=False, **named)
            if len(known) < _MOST_KNOWN and (compiled := self._ready(made, len(args), named)) is not None:
                known[key] = compiled
            return made
        stub, function, cooperative, dependent, packed, further = ready
        size = len(grid)
        y, z = grid[1] if size > 1 else 1, grid[2] if size > 2 else 1
        stub(
            grid[0], y, z, self._stream(), function, cooperative, dependent, None, None, packed, None, None, None,
            *passed, *further,
        )  # fmt: skip
        return None

    def _reader(self, kinds: tuple[type, ...]) -> tuple[Read | None, dict[tuple, Ready]]:
        return make_read(self.kernel.params[: len(kinds)], kinds), {}

    def _ready(self, made: Any, count: int, named: dict[str, Any]) -> Ready | None:
        """None: this kernel needs more than a call to its stub."""
        run = made.run
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        left = self.kernel.params[count:]
        if not all(param.is_constexpr for param in left):
            return None
        further = tuple(named.get(param.name, param.default) for param in left)
        return run.launch, made.function, run.launch_cooperative_grid, run.launch_pdl, made.packed_metadata, further


def make_read(params: list[Any], kinds: tuple[type, ...]) -> Read | None:
    """A generated function of the arguments of these types; None: Triton must inspect an argument of this type."""
    lines: list[str] = []
    key: list[str] = []
    passed: list[str] = []
    aligned: list[str] = []  # addresses whose alignment matters
    for i, (param, kind) in enumerate(zip(params, kinds, strict=True)):
        name = f"a{i}"
        if param.is_constexpr or kind is int:
            fixed = param.do_not_specialize and not param.is_constexpr
            key.append(f"-{_SMALL} <= a{i} < {_SMALL}" if fixed else name)
        elif hasattr(kind, "data_ptr"):
            lines.append(f"p{i} = a{i}.data_ptr()")
            key.append(f"a{i}.dtype")
            name = f"p{i}"
            if not (param.do_not_specialize or param.do_not_specialize_on_alignment):
                aligned.append(name)
        elif kind in DESCRIPTORS:  # TMA descriptors: the stub takes them directly
            key.append(f"(a{i}.base.dtype, *a{i}.block_shape)")
        elif kind not in (float, bool, type(None)):
            return None
        passed.append(name)
    if aligned:
        each = ", ".join(f"{name} & 15 == 0" for name in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    body = "".join(f"    {line}\n" for line in lines)
    text = f"def read({names}):\n{body}    return ({_row(key)}), ({_row(passed)})\n"
    scope: dict[str, Any] = {}
    exec(text, scope)  # generated from numbers and fixed names only
    function: Read = scope["read"]
    return function


def _row(parts: list[str]) -> str:
    return ", ".join(parts) + ("," if parts else "")


def kernels_of(modules: Iterable[ModuleType]) -> list[JITFunction]:
    """Every kernel and device function that these modules define."""
    kernels = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    return list(kernels.values())


def install(modules: Iterable[ModuleType], stream: Callable[[], int]) -> list[Launcher]:
    """Give these modules' kernels a Launcher; `stream` returns the handle of the current stream."""
    launchers = []
    for kernel in kernels_of(modules):
        if not isinstance(kernel.run, Launcher):
            for param in kernel.params:
                param.do_not_specialize_on_alignment |= param.name in LISTS
            kernel.device_caches.clear()
            kernel.run = Launcher(kernel, stream)
        launchers.append(kernel.run)
    return launchers


class Zeroed(TorchFunctionMode):
    """Uninitialized tensors are zero: no kernel writes them, but torch may read them, as values or as indices
    that must be in bounds."""

    INSTEAD = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.INSTEAD.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def recorded(launchers: Iterable[Launcher], note: Callable[..., bool]) -> Iterator[None]:
    """Inside, no kernel is launched; `note` is called with each one that would have to be compiled or loaded."""
    saved = list(launchers)
    for launcher in saved:
        launcher.record(True)
    knobs.runtime.jit_cache_hook = note
    try:
        with Zeroed():
            yield
    finally:
        knobs.runtime.jit_cache_hook = None
        for launcher in saved:
            launcher.record(False)


def watch() -> None:
    """From now on log whenever a kernel is compiled: requests wait for that too."""

    def on_compile(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds = (times.ir_initialization + sum(each for _, each in times.lowering_stages)) / 1e6
            _log.warning("compiled %s in %.2f s while serving: it was not precompiled at start-up", src.name, seconds)

    knobs.compilation.listener = on_compile


def unwatch() -> None:
    """Start-up begins: compilations are expected now."""
    knobs.compilation.listener = None


def current_stream() -> Callable[[], int]:
    """The handle of the current stream of this process's GPU, through torch's cheapest call."""
    device = torch.cuda.current_device()
    ask = torch._C._cuda_getCurrentRawStream
    return lambda: ask(device)


def arch() -> int:
    """The architecture that Triton compiles for: 90 for Hopper."""
    target: Any = driver.active.get_current_target()
    return int(target.arch)
