"""Op: a torch reference and any number of faster forms. Kernels: which of them a model uses.

The reference defines the op, runs if no form exists, and is what every form is tested against. Forms in
torch are declared next to their op; compiled ones are in a `FormTable` per device type, which is immutable once made.
`Kernels` is a value: a device, the compiled forms that may be used there, and whether results may depend on the batch.
Whoever builds a model creates one and passes it down (`Storage.kernels`); a layer calls `kernels.of(op)` when it is
built and keeps the function, so nothing is looked up while a step runs, and models in one process are independent.
Ops take tensors and numbers and return tensors. They must not know modules, models or configuration.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

from quire.base import env, registry

# Device type -> the function that returns its compiled forms, and the package it needs.
COMPILED = {"cpu": ("quire.ops.cpu.forms:compiled", ""), "cuda": ("quire.ops.triton.register:compiled", "triton")}

P = ParamSpec("P")
R = TypeVar("R")
Fits: TypeAlias = "Callable[[Kernels], bool]"
Make: TypeAlias = "Callable[[Callable[P, R], Kernels], Callable[P, R]]"


def always(kernels: Kernels) -> bool:
    return True


def same_bits(kernels: Kernels) -> bool:
    """For forms that are only used in batch-invariant mode."""
    return kernels.batch_invariant


class OpForm(NamedTuple):
    """A faster implementation of an op on one device type; `fits` says whether these kernels include it."""

    device: str
    fits: Fits
    function: Callable
    is_made: bool = False  # `function` is a factory: (the form used otherwise, the kernels) -> the form


class Op(Generic[P, R]):
    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.forms: list[OpForm] = []  # those in torch, declared next to the op
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Op({self.name}, forms on {sorted({form.device for form in self.forms})})"

    def form(self, device: str, fits: Fits = always) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: another form for this device type; the form added last is preferred."""

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.forms.append(OpForm(device, fits, function))
            return function

        return add

    def made(self, device: str, fits: Fits = always) -> Callable[[Make[P, R]], Make[P, R]]:
        """Decorator: as `form`, for a factory that makes the form for each caller from the form used otherwise and the
        kernels."""

        def add(make: Make[P, R]) -> Make[P, R]:
            self.forms.append(OpForm(device, fits, make, is_made=True))
            return make

        return add

    def on(self, device: torch.device | str) -> Callable[P, R]:
        """The function to call on this device, given the current machine and environment."""
        return Kernels.here(device).of(self)


class FormTable:
    """Compiled forms of ops for one device type. Filled when it is created, then read-only."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._forms: dict[Op[Any, Any], list[OpForm]] = {}

    def form(self, op: Op[P, R], fits: Fits = always) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator, as Op.form."""

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self._forms.setdefault(op, []).append(OpForm(self.device, fits, function))
            return function

        return add

    def made(self, op: Op[P, R], fits: Fits = always) -> Callable[[Make[P, R]], Make[P, R]]:
        """Decorator, as Op.made."""

        def add(make: Make[P, R]) -> Make[P, R]:
            self._forms.setdefault(op, []).append(OpForm(self.device, fits, make, is_made=True))
            return make

        return add

    def forms_of(self, op: Op[Any, Any]) -> list[OpForm]:
        return self._forms.get(op, [])


@dataclass(frozen=True)
class Kernels:
    """Which form of an op runs, on one device. Without a table, forms in torch only."""

    device: torch.device
    table: FormTable | None = None
    library: ctypes.CDLL | None = None  # compiled CPU kernels, for callers that are not ops
    batch_invariant: bool = False

    @classmethod
    def here(cls, device: torch.device | str) -> Kernels:
        """What this machine supports and the environment allows."""
        device = torch.device(device)
        compiled = _compiled(device.type)
        table, library = (None, None) if compiled is None else compiled()
        return cls(device, table, library, env.BATCH_INVARIANT.get())

    def of(self, op: Op[P, R]) -> Callable[P, R]:
        """The function that computes this op."""
        kind = self.device.type
        forms = [form for form in op.forms if form.device == kind]
        if self.table is not None:
            forms += self.table.forms_of(op)
        function = op.reference
        for form in forms:
            if form.fits(self):
                function = form.function(function, self) if form.is_made else form.function
        return function


@cache
def _compiled(kind: str) -> Callable[[], tuple[FormTable | None, ctypes.CDLL | None]] | None:
    path, package = COMPILED.get(kind, ("", ""))
    if not path or (package and importlib.util.find_spec(package) is None):
        return None
    make_table: Callable[[], tuple[FormTable | None, ctypes.CDLL | None]] = registry.load(path)
    return make_table


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Decorator: this function is the reference of an op."""
    return Op(reference)


@cache
def cpu_dtypes() -> frozenset[torch.dtype]:
    """The dtypes this CPU multiplies natively. For others torch falls back to a loop, 50 times slower than float32; on
    ARM it does so for float16 although oneDNN claims support."""
    dtypes = {torch.float32, torch.float64}
    if torch.backends.mkldnn.is_available():
        dtypes |= {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
        if platform.machine() not in ("aarch64", "arm64") and torch.ops.mkldnn._is_mkldnn_fp16_supported():
            dtypes.add(torch.float16)
    return frozenset(dtypes)
