"""Which device there is: found without torch, so that a configuration can be resolved before anything heavy is loaded.

In: the driver's own library (NVML), the device files, CUDA_VISIBLE_DEVICES. Out: the GPU a worker will see first, or
None. NVML starts no CUDA context. Must not know: what a GPU is used for.
"""

import ctypes
import importlib.util
import os
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


def _ask(library: Any, wanted: str | None) -> Gpu | None:
    """By index or by UUID; any answer but 0 is NVML's way to say no."""
    if library.nvmlInit_v2() != 0:
        return None
    device, count = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    if wanted is None or wanted.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(wanted or 0)), ctypes.byref(device))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(device))
    if failed:
        return None
    name, memory = ctypes.create_string_buffer(96), _Memory()
    library.nvmlDeviceGetName(device, name, ctypes.c_uint(96))
    library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    library.nvmlShutdown()
    return Gpu(name.value.decode(errors="replace"), int(memory.total))
