"""A profile window on a worker: torch's own profiler, or the window of an outside CUDA profiler (profiler_config).

`start` and `stop` are called by import path, between steps, on the worker's thread. A trace is a Chrome trace file in
torch_profiler_dir. Must not know: requests, steps.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from quire.base.log import logger
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from quire.worker.worker import Worker

log = logger(__name__)
_open: WeakKeyDictionary[Any, tuple[torch.profiler.profile | None, str]] = WeakKeyDictionary()
_ROWS = 20  # of the table in the log


def start(worker: Worker, prefix: str | None = None) -> None:
    options = worker.config.profiler_config
    if options.profiler is None:
        raise InputError(
            "profiling is off: start with profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER}",
            param="profiler_config",
        )
    if worker in _open:
        raise InputError("a profile is being recorded already; stop_profile ends it")
    if prefix is not None and os.path.basename(prefix) != prefix:
        raise InputError(f"profile_prefix is the beginning of a file's name, not a path, got {prefix!r}")
    name = f"{prefix or 'quire'}-{socket.gethostname()}-rank{worker.rank}-{time.time_ns()}"
    if options.profiler == "cuda":
        torch.cuda.profiler.start()
        _open[worker] = (None, name)
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    window = torch.profiler.profile(
        activities=kinds,
        record_shapes=options.torch_profiler_record_shapes,
        profile_memory=options.torch_profiler_with_memory,
        with_stack=options.torch_profiler_with_stack,
        with_flops=options.torch_profiler_with_flops,
    )
    window.start()
    _open[worker] = (window, name)


def stop(worker: Worker) -> str | None:
    """The trace file; None where an outside profiler keeps it."""
    if worker not in _open:
        raise InputError("no profile is being recorded; start_profile begins one")
    window, name = _open.pop(worker)
    if window is None:
        torch.cuda.profiler.stop()
        return None
    options = worker.config.profiler_config
    window.stop()
    folder = os.path.abspath(os.path.expanduser(options.torch_profiler_dir))
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{name}.pt.trace.json" + (".gz" if options.torch_profiler_use_gzip else ""))
    window.export_chrome_trace(path)
    if options.torch_profiler_dump_cuda_time_total and worker.device.type == "cuda":
        log.info("Profile:\n%s", window.key_averages().table(sort_by="self_cuda_time_total", row_limit=_ROWS))
    log.info("Profile written to %s", path)
    return path
