"""Documented names whose feature Quire does not have: they can be imported, and say so when they are used.

Programs import them at the top for a path that they may never take, so the import must not be what fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.schema.errors import NotBuiltError

_MEDIA = "sample media and writing video are not in this version of Quire; give a PIL image, an array or a URL"
_WEIGHTS = "sending weights to a running engine is not in this version of Quire"
CLASSES = {
    "AudioAsset": _MEDIA,
    "ImageAsset": _MEDIA,
    "VideoAsset": _MEDIA,
    "MediaConnector": _MEDIA,
    "NCCLTrainerSendWeightsArgs": _WEIGHTS,
    "NCCLWeightTransferEngine": _WEIGHTS,
    "WeightTransferUpdateRequest": _WEIGHTS,
}
FUNCTIONS = {
    "encode_video_base64": _MEDIA,
    "packed_nccl_broadcast_producer": _WEIGHTS,
    "trainer_init": _WEIGHTS,
}
_made: dict[str, Any] = {}


def _refusing_class(name: str, why: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotBuiltError(f"{name}: {why}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not here: {why}.", "__module__": __name__})


def _refusing_function(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(f"{name}: {why}")

    refuse.__name__ = name
    return refuse


def __getattr__(name: str) -> Any:
    if name not in _made:
        if name in CLASSES:
            _made[name] = _refusing_class(name, CLASSES[name])
        elif name in FUNCTIONS:
            _made[name] = _refusing_function(name, FUNCTIONS[name])
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made[name]
