"""What the files of a checkpoint say about its processor, over a family's defaults, under the options of a request.

In: config.json as read, preprocessor_config.json, processor_config.json, video_preprocessor_config.json. Out: values
by name, checked when they are asked for. Must not know: families.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.media.pixels import Levels, Size
from quire.schema.errors import CheckpointError, InputError

_MOST_BYTES = 1 << 20
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_FILTERS = range(6)
_MOST_LEVEL, _LEAST_DEVIATION = 1e3, 1e-3  # of pixels, so that what follows stays numbers


@dataclass(frozen=True)
class ProcessorFiles:
    """The files by part. `processor`: what holds for all parts."""

    config: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str, config: Mapping[str, Any]) -> ProcessorFiles:
        processor = read_json(folder, "processor_config.json")
        older = read_json(folder, "preprocessor_config.json")
        video = read_json(folder, "video_preprocessor_config.json")
        parts: dict[str, Mapping[str, Any]] = {}
        for modality, name in _PARTS.items():
            nested = processor.get(name)
            single = video if modality == "video" else older
            parts[modality] = nested if isinstance(nested, Mapping) else single
        return cls(config, processor, parts)

    @property
    def processor_class(self) -> str:
        names = (self.processor, *self.parts.values())
        return next((str(part["processor_class"]) for part in names if part.get("processor_class")), "")

    @property
    def vision(self) -> Mapping[str, Any]:
        return self.section("vision_config")

    def section(self, name: str) -> Mapping[str, Any]:
        """Of config.json."""
        return _section(self.config, name)

    def numbers(self, section: str = "") -> Settings:
        """What config.json, or a section of it, says; checked as settings are."""
        return Settings(self.section(section) if section else self.config, place=section or "config.json")

    @property
    def is_found(self) -> bool:
        return bool(self.processor) or any(self.parts.values())


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def read_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    if os.path.getsize(path) > _MOST_BYTES:
        raise CheckpointError(f"{name} has {os.path.getsize(path)} bytes; the limit is {_MOST_BYTES}")
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{name} cannot be read: {wrong}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{name} must hold an object, got {type(data).__name__}")
    return data


@dataclass(frozen=True)
class Settings:
    """Values by name. An option that no family knows is refused."""

    values: Mapping[str, Any]
    further: frozenset[str] = frozenset()  # known names without a value
    place: str = "the media processor"  # of which errors tell

    @classmethod
    def of(cls, defaults: Mapping[str, Any], own: Mapping[str, Any], further: Iterable[str] = ()) -> Settings:
        values = {name: value for name, value in own.items() if value is not None}
        return cls({**defaults, **values}, frozenset(further))

    def over(self, options: Mapping[str, Any]) -> Settings:
        """With the options of a request."""
        if not options:
            return self
        unknown = [name for name in options if not self.knows(name)]
        if unknown:
            known = sorted({*self.values, *self.further})
            raise InputError(
                f"mm_processor_kwargs has {unknown[0]!r:.60}, which this model's processor does not know; it knows "
                f"{', '.join(known)}"[:1500],
                param="mm_processor_kwargs",
            )
        return replace(self, values={**self.values, **{k: v for k, v in options.items() if v is not None}})

    def knows(self, name: str) -> bool:
        """Whether a request may name it."""
        return name in self.values or name in self.further

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        return self._whole(name, self.get(name, default), low, high)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(self, name: str, default: float, *, high: float = math.inf) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high or value == math.inf:
            expected = "a positive number" if high == math.inf else f"a positive number up to {high:g}"
            raise self._wrong(name, expected, value)
        return float(value)

    def filter(self, default: int) -> int:
        """Pillow's number of a resampling filter."""
        value = self.get("resample", default)
        if isinstance(value, bool) or not isinstance(value, int) or value not in _FILTERS:
            raise self._wrong("resample", "a filter number from 0 to 5", value)
        return value

    def edges(self, name: str) -> dict[str, int]:
        """A size: {"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"}, or one number."""
        value = self.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return {"shortest_edge": self._whole(name, value, 1, 1 << 31)}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "a mapping with height and width, or with shortest_edge", value)
        edges = {str(key): edge for key, edge in value.items() if edge is not None}
        return {key: self._whole(f"{name}.{key}", edge, 1, 1 << 31) for key, edge in edges.items()}

    def box(self, name: str) -> Size:
        """A size that is a height and a width."""
        edges = self.edges(name)
        if "height" in edges and "width" in edges:
            return edges["height"], edges["width"]
        if (edge := edges.get("shortest_edge", edges.get("longest_edge"))) is not None:
            return edge, edge
        raise self._wrong(name, "a mapping with height and width", self.get(name))

    def levels(self) -> Levels:
        scale = self.number("rescale_factor", 1 / 255, high=_MOST_LEVEL) if self.flag("do_rescale", True) else None
        if not self.flag("do_normalize", True):
            return Levels(scale)
        return Levels(scale, self._channels("image_mean"), self._channels("image_std"))

    def _channels(self, name: str) -> tuple[float, ...]:
        value = self.get(name)
        values = [value] * 3 if isinstance(value, (int, float)) else value
        if not isinstance(values, (list, tuple)) or len(values) != 3:
            raise self._wrong(name, "three numbers", value)
        if any(isinstance(part, bool) or not isinstance(part, (int, float)) for part in values):
            raise self._wrong(name, "three numbers", value)
        if name == "image_std" and not all(values):
            raise self._wrong(name, "three numbers other than 0", value)
        least = _LEAST_DEVIATION if name == "image_std" else 0
        if not all(least <= abs(part) <= _MOST_LEVEL for part in values):
            raise self._wrong(name, f"three numbers whose size is from {least:g} to {_MOST_LEVEL:g}", value)
        return tuple(float(part) for part in values)

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"a whole number from {low} to {high}", value)
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> InputError:
        return InputError(f"{name} of {self.place} must be {expected}, got {value!r:.100}", param=name)
