"""Op: one meaning (a torch reference) and any number of faster forms, chosen once per device.

The reference is what the op means, what runs where no form exists, and what every form is tested against. A layer
asks `op.on(device)` when it is built and keeps the function; nothing is looked up while a step runs. The answer follows
from the machine and the environment alone, never from what else this process has built: compiled forms are attached by
whoever asks first (`ATTACH`), and whether one fits is asked each time.
Ops take tensors and numbers and return tensors. They must not know modules, models or configuration.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable
from functools import cache
from typing import Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

from quire.base import registry

# Type of device -> what attaches its compiled forms, and the package without which there are none.
ATTACH = {"cpu": ("quire.ops.cpu.forms:attach", ""), "cuda": ("quire.ops.triton.register:register", "triton")}

P = ParamSpec("P")
R = TypeVar("R")
Make: TypeAlias = Callable[[Callable[P, R]], Callable[P, R]]


class Form(NamedTuple):
    """A faster way to compute an op on one kind of device; `fits` says whether this machine can run it."""

    device: str
    fits: Callable[[], bool]
    function: Callable
    is_made: bool = False  # `function` makes the form, as the environment is when somebody asks


class Op(Generic[P, R]):
    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.forms: list[Form] = []
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Op({self.name}, forms on {sorted({form.device for form in self.forms})})"

    def form(self, device: str, fits: Callable[[], bool] = lambda: True) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: another form for this device type; the form added last is preferred."""

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.forms.append(Form(device, fits, function))
            return function

        return add

    def made(self, device: str, fits: Callable[[], bool] = lambda: True) -> Callable[[Make[P, R]], Make[P, R]]:
        """Decorator: as `form`, of a function that makes the form for each who asks, given what they would get without
        it. What it reads of the environment holds for what it made, whatever the environment is later."""

        def add(make: Make[P, R]) -> Make[P, R]:
            self.forms.append(Form(device, fits, make, is_made=True))
            return make

        return add

    def on(self, device: torch.device | str) -> Callable[P, R]:
        """The function to call on this device."""
        kind = torch.device(device).type
        if (attach := _attacher(kind)) is not None:
            attach()
        return self._best(kind, len(self.forms))

    def _best(self, kind: str, end: int) -> Callable[P, R]:
        """Among the forms before `end`, the oldest first."""
        for place in reversed(range(end)):
            form = self.forms[place]
            if form.device == kind and form.fits():
                found: Callable[P, R] = form.function(self._best(kind, place)) if form.is_made else form.function
                return found
        return self.reference


@cache
def _attacher(kind: str) -> Callable[[], object] | None:
    path, package = ATTACH.get(kind, ("", ""))
    if not path or (package and importlib.util.find_spec(package) is None):
        return None
    found: Callable[[], object] = registry.load(path)
    return found


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Decorator: this function is the meaning of an op."""
    return Op(reference)


@cache
def cpu_dtypes() -> frozenset[torch.dtype]:
    """What this CPU multiplies natively. For other dtypes torch falls back to a loop, 50 times slower than float32; on
    ARM it does so for float16 although oneDNN says otherwise."""
    found = {torch.float32, torch.float64}
    if torch.backends.mkldnn.is_available():
        found |= {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
        if platform.machine() not in ("aarch64", "arm64") and torch.ops.mkldnn._is_mkldnn_fp16_supported():
            found.add(torch.float16)
    return frozenset(found)
