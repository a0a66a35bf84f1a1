"""The largest media items of a model, made in a thread while its weights are loaded, for measuring an encoder's memory.

In: the model's configuration. Out: items as requests bring them. A start does not fail for want of them. Must not know:
workers, what is measured.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from quire.base.log import logger
from quire.config import ModelConfig, MultiModalConfig
from quire.media.inputs import family_of
from quire.media.largest import largest_items
from quire.media.video import DEFAULT_FRAMES
from quire.schema.media import MediaItem

log = logger(__name__)


def make_largest(model: ModelConfig) -> Future[tuple[MediaItem, ...]]:
    pool = ThreadPoolExecutor(1, "largest-media")
    items = pool.submit(_make, model)
    pool.shutdown(wait=False)
    return items


def _make(model: ModelConfig) -> tuple[MediaItem, ...]:
    options = model.multimodal_config or MultiModalConfig()
    num = options.media_io_kwargs.get("video", {}).get("num_frames", DEFAULT_FRAMES)
    try:
        _, family = family_of(model)
        settings = options.mm_processor_kwargs or {}
        num_frames = num if isinstance(num, int) and num > 0 else DEFAULT_FRAMES
        items = largest_items(
            family, model.facts.modalities, options.limit_per_prompt, settings, num_frames, model.max_model_len
        )
    except Exception as wrong:  # noqa: BLE001  # of processors that are not ours, too
        log.info("The memory that the encoder takes is not measured: %s", wrong)
        return ()
    return tuple(items)
