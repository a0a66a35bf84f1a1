"""PipelineStage: which layers of a model one stage has, and which names of a checkpoint belong to other stages.

In: the ranks that hold the model (quant/shard.py), its architecture, PP_LAYER_PARTITION. The first stage embeds tokens,
the last one has the final norm and the head; a tied head's matrix is on both. Must not know: processes, tensors, how a
stage's output reaches the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from quire.base import env
from quire.models.arch import Arch
from quire.quant.shard import ShardGroup
from quire.schema.errors import ConfigError, NotBuiltError

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_SHARED = re.compile(r"^model\.shared\.(\d+)\.")
_FIRST = ("model.embed_tokens.", "model.embed_positions.", "model.project_in.", "model.embed_norm.")
_LAST = ("model.norm.", "model.project_out.", "lm_head.")


@dataclass(frozen=True)
class PipelineStage:
    index: int
    count: int
    layers: range  # of the model's

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @classmethod
    def of(cls, group: ShardGroup, arch: Arch) -> PipelineStage:
        total = len(arch.layers)
        if group.stages == 1:
            return cls(0, 1, range(total))
        if arch.cross >= 0:
            raise NotBuiltError(
                f"pipeline_parallel_size={group.stages}: encoder-decoder models are not cut into stages",
                param="pipeline_parallel_size",
                value=group.stages,
            )
        if arch.altup is not None:
            raise NotBuiltError(
                f"pipeline_parallel_size={group.stages}: models with several streams, whose layers read keys and "
                "values of layers before them, are not cut into stages",
                param="pipeline_parallel_size",
                value=group.stages,
            )
        ends = [0, *accumulate(layers_per_stage(total, group.stages, env.PP_LAYER_PARTITION.get()))]
        return cls(group.stage, group.stages, range(ends[group.stage], ends[group.stage + 1]))

    def elsewhere(self, arch: Arch) -> Callable[[str], bool] | None:
        """Whether a canonical name is of another stage; None: there is none."""
        if self.count == 1:
            return None
        own, total = self.layers, len(arch.layers)
        others: tuple[str, ...] = () if self.is_first else _FIRST[1:] if self.is_last and arch.tie else _FIRST
        others += () if self.is_last else _LAST
        users = () if arch.shared is None else arch.shared.users
        blocks = 1 if arch.shared is None else arch.shared.blocks
        shared = {turn % blocks for turn, user in enumerate(users) if user in own}

        def lies_elsewhere(name: str) -> bool:
            if (layer := _LAYER.match(name)) is not None:
                return int(layer[1]) not in own and int(layer[1]) < total
            if users and (block := _SHARED.match(name)) is not None:
                return int(block[1]) not in shared and int(block[1]) < blocks
            return name.startswith(others)

        return lies_elsewhere


class OtherStage(nn.Module):
    """In the place of a module that another stage has."""

    def forward(self, *args: Any) -> Any:
        raise RuntimeError("this module is on another pipeline stage")


def layers_per_stage(total: int, stages: int, partition: str = "") -> list[int]:
    """How many layers each stage has. `partition`: "9,11,12"; "": equal shares. Where these do not come out even, the
    last stage, which has the head, gets none of the rest, and the first one only what the others leave."""
    if partition:
        return _as_configured(total, stages, partition)
    if stages > total:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the model's {total} layers",
            param="pipeline_parallel_size",
            value=stages,
        )
    counts = [total // stages] * stages
    for i in range(total % stages):
        counts[-2 - i] += 1
    return counts


def _as_configured(total: int, stages: int, partition: str) -> list[int]:
    setting = f"QUIRE_PP_LAYER_PARTITION={partition[:200]!r}"
    parts = [part.strip() for part in partition.split(",", stages + 1)]
    if not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts):
        raise ConfigError(f"{setting} must be numbers of layers with commas between them, as 9,11,12")
    counts = [int(part) for part in parts]
    if len(counts) != stages:
        raise ConfigError(f"{setting} must have a number for each of the {stages} stages (pipeline_parallel_size)")
    if min(counts) < 1 or sum(counts) != total:
        raise ConfigError(f"{setting}: every stage needs a layer, and the numbers must add up to the model's {total}")
    return counts
