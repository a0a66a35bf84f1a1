"""One small item of each modality, processed before a model is loaded: what its files say that no item can be processed
with is told at start, not by each request.

In: a family, the modalities that prompts may have, and the engine's own options. Out: nothing, or an error that names
what is wrong. Must not know: engines, encoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.log import logger
from quire.media.families.base import Family
from quire.schema.errors import CheckpointError, ConfigError, InputError, MissingExtraError, NotBuiltError

log = logger(__name__)
_SIDE, _FRAMES, _RATE = 64, 2, 16000


def try_items(family: Family, modalities: Sequence[str], options: Mapping[str, Any]) -> None:
    """`options`: mm_processor_kwargs of the engine. What another part of a program or this version lacks is no error:
    the model still takes text."""
    refused: dict[str, InputError] = {}
    for modality in modalities:
        try:
            _try_item(family, modality, options)
        except (NotBuiltError, MissingExtraError) as lacking:
            log.warning("This model takes no %s items here: %s", modality, lacking)
        except InputError as wrong:
            refused[modality] = _blame(family, modality, options, wrong)
    if not refused:
        return
    if len(refused) == len(modalities):
        raise ConfigError(str(refused[modalities[0]]), param="mm_processor_kwargs")
    for modality, reason in refused.items():
        log.warning("No %s item can be processed with the engine's mm_processor_kwargs: %s", modality, reason)


def _blame(family: Family, modality: str, options: Mapping[str, Any], wrong: InputError) -> InputError:
    """The same error if the engine's options are the reason; else the files of the checkpoint are, and it is raised."""
    if options:
        try:
            _try_item(family, modality, {})
        except InputError as own:
            wrong = own
        else:
            return wrong
    raise unusable(modality, wrong)


def unusable(what: str, wrong: Exception) -> CheckpointError:
    return CheckpointError(
        f"{what} items cannot be processed as the files of this checkpoint say: {wrong} (--language-model-only starts "
        "the model for text alone)",
        param="model",
    )


def _try_item(family: Family, modality: str, options: Mapping[str, Any]) -> None:
    try:
        item = family.process(modality, _small(modality), options, 1)
    except (ValueError, ArithmeticError, LookupError, TypeError, MemoryError) as wrong:
        if isinstance(wrong, InputError):
            raise
        raise InputError(f"{type(wrong).__name__}: {str(wrong)[:200]}") from wrong
    if item.num_vectors < 1:
        raise InputError(f"an item of {modality} would have {item.num_vectors} vectors")


def _small(modality: str) -> Any:
    if modality == "audio":
        import numpy as np  # lazy

        from quire.media.audio import Audio  # lazy

        return Audio(np.zeros(_RATE, np.float32), _RATE)
    from quire.media.images import pillow  # lazy
    from quire.media.video import Video  # lazy

    image = pillow().Image.new("RGB", (_SIDE, _SIDE))
    return image if modality == "image" else Video([image] * _FRAMES, list(range(_FRAMES)), 1.0, _FRAMES)
