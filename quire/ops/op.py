"""Op: one meaning (a torch reference) and any number of faster forms, chosen once per device.

The reference is what the op means, what runs where no form exists, and what every form is tested against. A layer
asks `op.on(device)` when it is built and keeps the function; nothing is looked up while a step runs.
Ops take tensors and numbers and return tensors. They must not know modules, models or configuration.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Form(NamedTuple):
    """A faster way to compute an op on one kind of device; `fits` says whether this machine can run it."""

    device: str
    fits: Callable[[], bool]
    function: Callable


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

    def on(self, device: torch.device | str) -> Callable[P, R]:
        """The function to call on this device."""
        return self._best(self.forms, device)

    def before(self, function: Callable, device: torch.device | str) -> Callable[P, R]:
        """What `on` would give without this form and those added after it: what it leaves to others."""
        place = next(i for i, form in enumerate(self.forms) if form.function is function)
        return self._best(self.forms[:place], device)

    def _best(self, forms: list[Form], device: torch.device | str) -> Callable[P, R]:
        kind = torch.device(device).type
        for form in reversed(forms):
            if form.device == kind and form.fits():
                return form.function
        return self.reference


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
