"""What ranks must have in common beside their options, where they are on several machines or started from outside.

Each machine has an environment of its own, and versions of its own. Some of that decides which sums a step has, or how
large they are: ranks that differ in it would wait for each other for ever. In: what ranks say of themselves. Out: the
first difference, in words. Must not know: how it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quire import __version__
from quire.base import env

_VARIABLES = env.BATCH_INVARIANT, env.PP_LAYER_PARTITION, env.SHARE_GPUS
_PACKAGES = "torch", "triton"  # of which torch brings NCCL


def statement() -> dict[str, str]:
    """Of this process."""
    variables = {variable.spellings[0]: _value(variable) for variable in _VARIABLES}
    return {"quire": __version__, **{name: _version(name) for name in _PACKAGES}, **variables}


def difference(statements: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> str:
    """`statements`: by rank. `name`: of a rank. Nothing where all are alike."""
    for rank, other in enumerate(statements):
        for key, value in statements[0].items():
            if other.get(key) != value:
                return (
                    f"{name(rank)} has {key} {other.get(key)!r} and {name(0)} {value!r}: ranks that compute steps "
                    "together must not differ in it"
                )
    return ""


def _value(variable: env.Variable[Any]) -> str:
    try:
        return str(variable.get())
    except env.VariableError as wrong:  # where it is used, that is an error
        return str(wrong)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
