"""LoRA adapters as they cross packages: which one a request names, what a worker reads, where it lies in a step.

`LoRARequest` is the caller's; the engine gives every load a `serial` of its own (sched/adapter_slots.py), and
everything past the engine's door knows an adapter by that alone: two loads under one name never mix.
"""

from __future__ import annotations

from typing import Any

import msgspec


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Which adapter a request wants. `load_inplace`: for add_lora, which then replaces the adapter of that id."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError(f"lora_path of {self.lora_name!r} is empty")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class AdapterSource(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter for workers to read: into host memory first."""

    serial: int
    name: str  # for messages
    path: str
    digest: str = ""  # of the weights that were read before under this serial: others are an error; empty: none were


class AdapterRead(msgspec.Struct, frozen=True, kw_only=True):
    """What became of reading one."""

    serial: int
    error: str | None = None
    num_bytes: int = 0
    digest: str = ""  # of the weights


class AdapterPlacement(msgspec.Struct, frozen=True, gc=False):
    """Before this step, the adapter is copied into a slot of the device; what was there is gone."""

    serial: int
    slot: int  # from 1: 0 means no adapter wherever a row names its slot
