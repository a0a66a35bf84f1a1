"""LLaVA-NeXT-Video, whose frames are squares with features pooled two by two, and Video-LLaVA, of which images are
read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.media.families.base import ProcessedItem
from quire.media.families.llava import IMAGE, Llava, LlavaNext, check_resized, resized, tower_size
from quire.media.settings import ProcessorFiles


class LlavaNextVideo(LlavaNext):
    placeholders = {"image": "<image>", "video": "<video>"}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.placeholders = {"video": "<video>", **self.placeholders}
        self.video = self.settings("video", {**IMAGE, **tower_size(files, "video")}, "num_frames", "fps")

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "video":
            return super().process(modality, value, options, count)
        settings = self.video.over(options)
        check_resized(value.frames, settings)
        levels = settings.levels()
        array = np.stack([levels.apply(resized(frame, settings)) for frame in value.frames])
        height, width = array.shape[-2:]
        num = (height // self.tokens.patch) * (width // self.tokens.patch) // 4 * len(array)
        return ProcessedItem({"pixel_values_videos": array[None]}, self.placeholders["video"] * num, num)


class VideoLlava(Llava):
    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        item = super().process(modality, value, options, count)
        return item._replace(arrays={"pixel_values_images": item.arrays["pixel_values"]})
