"""What this machine computes with: its first GPU and what its CPU can do, found without torch.

In: the driver's own library (NVML), the device files, CUDA_VISIBLE_DEVICES; /proc/cpuinfo. Out: the GPU that a worker
will see first, or None; the CPU's flags. NVML starts no CUDA context. Must not know: what either is used for.
"""

import ctypes
import importlib.util
import os
import platform
from functools import cache
from typing import Any, NamedTuple

from quire.base import env

_LIBRARY = "libnvidia-ml.so.1"
_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/nvidiactl")


class Gpu(NamedTuple):
    name: str  # "" where the driver's library could not be asked
    total_bytes: int  # 0 likewise


@cache
def find_gpu() -> Gpu | None:
    """The first GPU this process may use; None without one, or without the packages that drive it."""
    visible = env.CUDA_VISIBLE_DEVICES.get()
    first = None if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles") or importlib.util.find_spec("triton") is None:
        return None
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Gpu("", 0) if any(os.path.exists(trace) for trace in _TRACES) else None
    return _ask(library, first)


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _ask(library: Any, selected: str | None) -> Gpu | None:
    """By index or by UUID; any answer but 0 is NVML's way to say no."""
    if library.nvmlInit_v2() != 0:
        return None
    device, count = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    if selected is None or selected.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(selected or 0)), ctypes.byref(device))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(selected.encode(), ctypes.byref(device))
    if failed:
        return None
    name, memory = ctypes.create_string_buffer(96), _Memory()
    library.nvmlDeviceGetName(device, name, ctypes.c_uint(96))
    library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    library.nvmlShutdown()
    return Gpu(name.value.decode(errors="replace"), int(memory.total))


def cpu_multiplies_bfloat16() -> bool:
    """True if this CPU has instructions for bfloat16 products."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags())


@cache
def cpu_flags() -> frozenset[str]:
    """What this CPU can do, in Linux's words; nothing elsewhere."""
    if platform.system() != "Linux":
        return frozenset()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return frozenset(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
