"""Which attention backend a device uses: the configured one, or the device's default; an error if it is unsupported.

In: a device name, an optional backend name, the layers' KV specs. Out: a backend. Must not know: kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.attention.backend import BACKENDS, AttentionBackend
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.kv import KVKind, KVSpec

BY_DEVICE = {"cpu": "CPU_ATTN", "cuda": "TRITON_ATTN"}
OTHER_NAMES = {"TORCH_SDPA": "CPU_ATTN"}
NEEDS = {"CPU_ATTN": "cpu", "TRITON_ATTN": "cuda"}  # the device a backend runs on


def select_backend(device: str, specs: Sequence[KVSpec], name: str | None = None) -> AttentionBackend:
    """`device` is a torch device string; only its type matters."""
    kind = device.partition(":")[0]
    if kind not in BY_DEVICE:
        raise NotBuiltError(f"no attention backend for device {device!r}; built: {', '.join(BY_DEVICE)}", value=device)
    chosen = BY_DEVICE[kind] if name is None else OTHER_NAMES.get(name.upper(), name.upper())
    if chosen not in BACKENDS:
        raise NotBuiltError(
            f"attention backend {name!r} is not built; built: {', '.join(BACKENDS)}", param="backend", value=name
        )
    if NEEDS.get(chosen, kind) != kind:
        raise ConfigError(
            f"attention backend {chosen} runs on {NEEDS[chosen]}, not on {device}", param="backend", value=name
        )
    backend: AttentionBackend = BACKENDS.get(chosen)()
    if any(spec.kind is KVKind.STATE for spec in specs):
        from quire.attention.state import WithStates  # lazy

        backend = WithStates(backend)
    if any(spec.kind is KVKind.CROSS for spec in specs):
        from quire.attention.cross import WithCross, WithPagedCross  # lazy

        reads_pages = all(backend.reads_pages(spec) for spec in specs if spec.kind is KVKind.CROSS)
        backend = WithPagedCross(backend) if reads_pages else WithCross(backend)
    for spec in specs:
        reason = backend.supports(spec)
        if reason is not None:
            raise ConfigError(f"attention backend {chosen} cannot serve layer {spec.layer!r}: {reason}")
    return backend
