"""The encoder of a model that takes media: transformers' tower, and how positions run through an item.

In: the configuration. Out: a TowerEncoder, or None where the model, as configured, takes no media. Must not know:
steps, requests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.checkpoint.media import both_ways_of, has_canvas
from quire.checkpoint.weight_files import find_weights
from quire.layers.vector_places import runs_of_vectors
from quire.models.build import read_arch
from quire.models.canvas import CanvasMarks, Crop, canvas
from quire.models.mrope import VisionGrid, mrope
from quire.ops.op import Kernels
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError
from quire.schema.media import KEPT, SIZES, ArrayData, MediaItem

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.hf_models.towers import Tower

_GRIDS = ("image_grid_thw", "video_grid_thw")
_NUMPY = {"float32": np.float32, "float64": np.float64, "int64": np.int64, "int32": np.int32}


class TowerEncoder:
    """`tower` None: vectors are given, and only have their places here."""

    def __init__(self, tower: Tower | None, raw: Mapping[str, Any], num_channels: int) -> None:
        self._tower, self.num_channels, self.both_ways = tower, num_channels, both_ways_of(raw)
        vision = raw.get("vision_config") or {}
        self._merge = int(vision.get("spatial_merge_size") or 2)
        self._per_second = vision.get("tokens_per_second")

    def encode(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        if self._tower is None:
            raise ValueError("the encoder of this model is not loaded (language_model_only, limit_mm_per_prompt)")
        vectors = self._tower.encode(modality, arrays)
        if (numbers := arrays.get(KEPT)) is None:
            return vectors
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= len(vectors)):
            raise ValueError(f"the item has {len(vectors)} vectors, of which {int(numbers.max())} is to be kept")
        return vectors[numbers]

    def reload(self, other: TowerEncoder) -> None:
        """Take another's weights, in place."""
        if self._tower is not None and other._tower is not None:
            self._tower.module.load_state_dict(other._tower.module.state_dict())

    def channels(self, prompt: Sequence[int], media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return mrope(len(prompt), [grid for item in media for grid in self._grids(item)])

    def _grids(self, item: MediaItem) -> list[VisionGrid]:
        """Those of its rows that a grid describes; embeddings have none and are as text."""
        name = next((name for name in _GRIDS if name in item.arrays), None)
        if name is None:
            return []
        (frames, height, width), *_ = _array(item.arrays[name]).reshape(-1, 3).tolist()
        interval = 1.0
        if item.modality == "video" and self._per_second is not None:
            seconds = _array(item.arrays["second_per_grid_ts"]) if "second_per_grid_ts" in item.arrays else [1.0]
            interval = float(self._per_second) * float(seconds[0])
        height, width = height // self._merge, width // self._merge
        runs = list(runs_of_vectors(item))
        numbers = _array(item.arrays[KEPT]) if KEPT in item.arrays else None
        if len(runs) == 1:
            return [VisionGrid(runs[0][0], (frames, height, width), interval, numbers)]
        if any(last - first != height * width for first, last in runs):
            raise ValueError(f"frames of {height} x {width} vectors stand at {runs[:4]}")
        return [VisionGrid(first, (1, height, width)) for first, _ in runs]  # frames with text between them


class CanvasEncoder(TowerEncoder):
    """Of MiniCPM-V 4.7."""

    def __init__(self, tower: Tower | None, raw: Mapping[str, Any], num_channels: int) -> None:
        super().__init__(tower, raw, num_channels)
        names = [f"{name}_id" for name in CanvasMarks._fields]
        if missing := [name for name in names if type(raw.get(name)) is not int]:
            raise ConfigError(f"config.json has no {missing[0]}, the id of a token: {raw.get(missing[0])!r:.60}",
                              param=missing[0])  # fmt: skip
        self._marks = CanvasMarks(*(raw[name] for name in names))
        self._merge = 2 if raw.get("downsample_mode") == "4x" else 4

    def channels(self, prompt: Sequence[int], media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        crops: list[Crop] = []
        for item in media:
            own = self._crops(item)
            if crops and own and prompt[own[0].start - 1] == self._marks.slice_start:
                # positions of the image before it, whose blocks may be cached, would depend on what follows
                raise ValueError(
                    f"the item at position {item.offset} begins with a slice: the mark of an image is missing"
                )
            crops += own
        return canvas(prompt, crops, self._marks)

    def _crops(self, item: MediaItem) -> list[Crop]:
        """Embeddings have no sizes and are as text."""
        name = next((name for name in SIZES if name in item.arrays), None)
        if name is None:
            return []
        sizes = (_array(item.arrays[name]).reshape(-1, 2) // self._merge).tolist()
        runs = list(runs_of_vectors(item))
        if len(runs) != len(sizes):
            raise ValueError(f"{len(sizes)} grids of vectors stand in {len(runs)} places")
        return [Crop(*run, *size) for run, size in zip(runs, sizes, strict=True)]


def _array(source: ArrayData) -> np.ndarray:
    return np.frombuffer(source.data, _NUMPY[source.dtype])


def _has_safetensors(config: EngineConfig) -> bool:
    how = config.load_config
    return find_weights(config.model_config.path, how.load_format, how.ignore_patterns).kind == "safetensors"


def make_encoder(config: EngineConfig, kernels: Kernels) -> TowerEncoder | None:
    about = config.model_config
    tower = _tower(config, kernels) if about.takes_encoder else None
    if tower is None and not about.takes_media_embeds:
        return None
    layers = () if about.is_encoder_decoder else read_arch(about.hf_config).layers
    sections = next((len(layer.rope.sections) for layer in layers if layer.rope is not None), 0)
    kind = CanvasEncoder if has_canvas(about.hf_config) else TowerEncoder
    return kind(tower, about.hf_config, sections)


def _tower(config: EngineConfig, kernels: Kernels) -> Tower:
    about = config.model_config
    if about.path.endswith(".gguf"):
        raise NotBuiltError(f"{about.path} has no encoder for media; set language_model_only=True", param="model")
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("the encoder of this model (language_model_only=True starts without)", "transformers",
                                "transformers")  # fmt: skip
    from quire.hf_models.towers import load_tower  # lazy

    is_dummy = config.load_config.load_format == "dummy"
    made: Tower = load_tower(
        about.hf_config, about.path, dtype=getattr(torch, about.dtype), device=kernels.device,
        is_dummy=is_dummy, safetensors=is_dummy or _has_safetensors(config),
        audio_path=about.part_paths.get("audio"),
    )  # fmt: skip
    return made
