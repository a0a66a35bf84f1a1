"""Gemma 3 and PaliGemma: one square per image for SigLIP; Gemma 3 may add crops of long images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, BILINEAR, HALF, Family, ProcessedItem
from quire.media.pixels import Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": HALF,
    "image_std": HALF,
    "do_convert_rgb": True,
}
_CROPS = "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"
_MOST_CROPS = 64


class Gemma3(Family):
    placeholders = {"image": "<start_of_image>"}
    features = {"image": "<image_soft_token>"}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = files.vision.get("image_size") or 224
        defaults = {**_STEPS, "size": {"height": side, "width": side}, "resample": BILINEAR}
        self.image = self.settings("image", defaults, "do_pan_and_scan", *_CROPS)
        own = self.processor({"image_seq_length": files.config.get("mm_tokens_per_image") or 256})
        self.num = own.whole("image_seq_length", high=1 << 16)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        crops = _crops(value, settings) if settings.flag("do_pan_and_scan") else []
        size, filter_, levels = settings.box("size"), settings.filter(BILINEAR), settings.levels()
        array = np.stack([levels.apply(pixels.planes(pixels.resize(part, size, filter_))) for part in (value, *crops)])
        text = one = self._one()
        if crops:
            text = f"Here is the original image {one} and here are some crops to help you see better "
            text += " ".join([one] * len(crops))
        return ProcessedItem({"pixel_values": array}, text, self.num * len(array))

    def _one(self) -> str:
        return f"\n\n<start_of_image>{self.features['image'] * self.num}<end_of_image>\n\n"

    def embeds_text(self, modality: str, num: int) -> str:
        if num != self.num:
            raise InputError(f"image embeddings have {num} vectors; this model has {self.num} per image")
        return self._one()


def _crops(image: Image, settings: Settings) -> list[Image]:
    """Along the longer side, where it is long enough."""
    least = settings.whole("pan_and_scan_min_crop_size", 256)
    most = settings.whole("pan_and_scan_max_num_crops", 4, high=_MOST_CROPS)
    ratio = settings.number("pan_and_scan_min_ratio_to_activate", 1.2)
    width, height = image.width, image.height
    long, short = max(width, height), min(width, height)
    if long / short < ratio:
        return []
    num = min(math.floor(long / least), math.floor(long / short + 0.5))
    num = min(most, max(2, num))
    step = math.ceil(long / num)
    if min(step, short) < least:
        return []
    wide = width >= height
    boxes = [
        (place * step, 0, min(width, (place + 1) * step), height)
        if wide
        else (0, place * step, width, min(height, (place + 1) * step))
        for place in range(num)
    ]
    return [image.crop(box) for box in boxes if box[0] < box[2] and box[1] < box[3]]


class PaliGemma(Family):
    """The text follows a beginning-of-text token after the last image, and a line end follows the text."""

    placeholders = {"image": "<image>"}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = files.vision.get("image_size") or 224
        patch = files.vision.get("patch_size") or 14
        defaults = {**_STEPS, "size": {"height": side, "width": side}, "resample": BICUBIC}
        self.image = self.settings("image", defaults, "image_seq_length")
        self.num = self.image.whole("image_seq_length", (side // patch) ** 2, high=1 << 16)

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        size: Size = settings.box("size")
        array = settings.levels().apply(pixels.planes(pixels.resize(value, size, settings.filter(BICUBIC))))
        return ProcessedItem({"pixel_values": array[None]}, self.placeholders["image"] * self.num, self.num)

    def lay_out(self, text: str) -> str:
        token = self.placeholders["image"]
        if token not in text:
            raise InputError(f"a prompt of this model begins with {token}, once for each image", param="prompt")
        end = text.rfind(token) + len(token)
        if text[end:].startswith("<bos>"):
            return text
        return f"{text[:end]}<bos>{text[end:]}\n"
