"""How devices are arranged: tensor x pipeline ranks form a replica, data-parallel replicas form the fleet.

Owns: which arrangements are possible for a model, and how many KV blocks a replica has. Must not know: time.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.sched.kv_layout import arrange, blocks_needed
from quire.schema.errors import ConfigError
from quire.schema.kv import KVLayout
from quire.simulate.devices import GIB, DeviceModel
from quire.simulate.shape import BYTES, ModelShape

MOST_DEVICES = 10_000
_OWN_BYTES = int(1.5 * GIB)  # context, graphs, tables and workspaces
_STEP_WIDTHS = 8  # hidden states of a step that lie in memory at once


@dataclass(frozen=True, kw_only=True)
class Topology:
    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1
    has_expert_parallel: bool = False

    @property
    def replica_size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def num_devices(self) -> int:
        return self.replica_size * self.data_size

    def __str__(self) -> str:
        parts = [
            f"TP {self.tensor_size}",
            f"PP {self.pipeline_size}" * (self.pipeline_size > 1),
            f"DP {self.data_size}",
        ]
        return " x ".join(part for part in parts if part) + (" with EP" if self.has_expert_parallel else "")

    def check(self, shape: ModelShape) -> None:
        """ConfigError if this model cannot be divided so."""
        for name, value in (
            ("tensor_parallel_size", self.tensor_size),
            ("pipeline_parallel_size", self.pipeline_size),
            ("data_parallel_size", self.data_size),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name, value=value)
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(f"{self} has {self.num_devices} devices; at most {MOST_DEVICES} are simulated")
        if shape.num_heads % self.tensor_size:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_size} does not divide the {shape.num_heads} attention heads of "
                f"{shape.name}",
                param="tensor_parallel_size",
            )
        if self.pipeline_size > shape.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_size} is more than the {shape.num_layers} layers of "
                f"{shape.name}",
                param="pipeline_parallel_size",
            )
        if self.has_expert_parallel and not shape.num_experts:
            raise ConfigError(f"enable_expert_parallel: {shape.name} has no experts", param="enable_expert_parallel")

    def stage_layers(self, shape: ModelShape) -> int:
        """Layers of the fullest stage, which sets the pace."""
        return -(-shape.num_layers // self.pipeline_size)

    def rank_weight_bytes(self, shape: ModelShape) -> float:
        """On the fullest rank: its share of layers, and of embeddings or head at the ends."""
        ends = shape.head_params * (1 if shape.has_tied_head or self.pipeline_size > 1 else 2)
        whole = shape.head_params * (1 if shape.has_tied_head else 2)
        layers = (shape.num_params - whole) * self.stage_layers(shape) / shape.num_layers
        return (layers + ends) * BYTES / self.tensor_size


def kv_layout(
    topology: Topology,
    shape: ModelShape,
    device: DeviceModel,
    *,
    memory_utilization: float,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> KVLayout:
    """The KV blocks of a replica; ConfigError if the weights or one longest request do not fit."""
    step_bytes = max_num_batched_tokens * shape.hidden_size * BYTES * _STEP_WIDTHS
    claimed, weights = device.memory_bytes * memory_utilization, topology.rank_weight_bytes(shape)
    free = int(claimed - weights - step_bytes - _OWN_BYTES)
    if free <= 0:
        raise ConfigError(
            f"{shape.name} does not fit {topology}: a rank has {weights / GIB:.1f} GiB of weights and needs "
            f"{(step_bytes + _OWN_BYTES) / GIB:.1f} GiB for a step, and may use {claimed / GIB:.1f} GiB of one "
            f"{device.name}; raise tensor_parallel_size or pipeline_parallel_size",
            param="tensor_parallel_size",
        )
    specs = shape.kv_specs(block_size, topology.tensor_size, topology.stage_layers(shape))
    layout = arrange(specs, max_model_len, max_num_batched_tokens)
    layout = msgspec.structs.replace(layout, num_blocks=free // (layout.page_bytes * len(layout.slots)))
    if (need := blocks_needed(layout, max_model_len, max_num_batched_tokens)) > layout.num_blocks:
        raise ConfigError(
            f"one request of max_model_len={max_model_len} needs {need} KV blocks, but {free / GIB:.1f} GiB of one "
            f"{device.name} hold {layout.num_blocks} under {topology}; lower max_model_len or raise "
            "tensor_parallel_size",
            param="max_model_len",
            value=max_model_len,
        )
    return layout
