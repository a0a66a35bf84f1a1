"""What ranks must have in common beside their options, where they are on several machines or started from outside.

Each machine has an environment of its own, and versions of its own. Some of that decides which sums a step has, or how
large they are: ranks that differ in it would wait for each other for ever. What they compute with may differ; that
costs speed, and bits. In: what ranks say of themselves. Out: the first difference, in words; what is worth a warning.
Must not know: how it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quire import __version__
from quire.base import env
from quire.base.machine import cpu_flags, find_gpu

_VARIABLES = env.BATCH_INVARIANT, env.PP_LAYER_PARTITION, env.SHARE_GPUS
_PACKAGES = "torch", "triton"  # of which torch brings NCCL
_GPU, _CPU, _KERNELS = "GPU", "CPU instructions", env.CPU_KERNELS.spellings[0]
_WHERE = {_GPU: "on GPUs", _CPU: "on CPUs", _KERNELS: "on CPUs"}  # what differs matters
_MACHINE = tuple(_WHERE)  # in which ranks may differ
_INSTRUCTIONS = (  # in Linux's words: those that kernels are chosen by, Quire's own or torch's
    "asimddp", "sve", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip


def statement() -> dict[str, str]:
    """Of this process."""
    variables = {variable.spellings[0]: _value(variable) for variable in _VARIABLES}
    return {"quire": __version__, **{name: _version(name) for name in _PACKAGES}, **variables, **_machine()}


def difference(statements: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> str:
    """`statements`: by rank. `name`: of a rank. Nothing where all are alike."""
    for rank, other in enumerate(statements):
        for key, value in statements[0].items():
            if key not in _MACHINE and other.get(key) != value:
                return (
                    f"{name(rank)} has {key} {other.get(key)!r} and {name(0)} {value!r}: ranks that compute steps "
                    "together must not differ in it"
                )
    return ""


def remarks(statements: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> list[str]:
    """How the machines of ranks differ: of each thing they compute with, the first difference."""
    words = []
    for key in _MACHINE:
        values = [one.get(key, "") for one in statements]
        if other := next((rank for rank, value in enumerate(values) if value != values[0]), 0):
            words.append(
                f"{name(other)} has {key} {values[other]!r} and {name(0)} {values[0]!r}: {_WHERE[key]} a step takes as "
                "long as on the slower of them, and their sums may round differently"
            )
    return words


def _machine() -> dict[str, str]:
    """The first GPU, as ranks of one machine have the same ones; of the CPU what kernels are chosen by."""
    gpu, flags = find_gpu(), cpu_flags()
    return {
        _GPU: "none" if gpu is None else gpu.name or "unknown",
        _CPU: " ".join(flag for flag in _INSTRUCTIONS if flag in flags),
        _KERNELS: _value(env.CPU_KERNELS),
    }


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
