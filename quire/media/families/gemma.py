"""Gemma 3 and PaliGemma: one square per image for SigLIP; Gemma 3 may add crops of long images. Gemma 3n: one square,
and audio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.audio import Audio, resample
from quire.media.families.base import BICUBIC, BILINEAR, HALF, Family, ProcessedItem
from quire.media.images import check_crops
from quire.media.mel import MagnitudeOptions, check_transforms, log_magnitudes
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
_MOST_CROPS, _MOST_SIDE = 64, 4096
_SPEECH = {
    "feature_size": 128, "sampling_rate": 16000, "frame_length_ms": 32.0, "hop_length_ms": 10.0, "min_frequency": 125.0,
    "max_frequency": 7600.0, "preemphasis": 0.97, "preemphasis_htk_flavor": True, "fft_overdrive": True, "dither": 0.0,
    "input_scale_factor": 1.0, "mel_floor": 1e-5,
}  # fmt: skip
_MOST_SAMPLES, _SAMPLES_STEP = 480_000, 128


class Gemma3(Family):
    placeholders = {"image": "<start_of_image>"}
    features = {"image": "<image_soft_token>"}
    fixed = ("size",)

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
        check_crops([size] * (1 + len(crops)), "pan_and_scan_max_num_crops")
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


class Gemma3n(Family):
    """Every item has the same number of vectors: what audio is too short for is filled by its encoder."""

    placeholders = {"image": "<image_soft_token>", "audio": "<audio_soft_token>"}
    fixed = ("size",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        image = {**_STEPS, "do_normalize": False, "size": {"height": 768, "width": 768}, "resample": BILINEAR}
        self.image = self.settings("image", image)
        self.audio = self.settings("audio", _SPEECH)
        own = self.processor({
            "image_seq_length": files.config.get("vision_soft_tokens_per_image") or 256,
            "audio_seq_length": files.config.get("audio_soft_tokens_per_image") or 188,
        })  # fmt: skip
        self.nums = {name: own.whole(f"{name}_seq_length", high=1 << 16) for name in self.placeholders}

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality == "image":
            settings = self.image.over(options)
            size, filter_ = settings.box("size"), settings.filter(BILINEAR)
            array = settings.levels().apply(pixels.planes(pixels.resize(value, size, filter_)))
            return self._item(modality, {"pixel_values": array[None]})
        if modality == "audio":
            return self._item(modality, self._heard(value, self.audio.over(options)))
        raise self.refuse(modality)

    def _heard(self, audio: Audio, settings: Settings) -> dict[str, Any]:
        """Samples, of which those behind half a minute are cut off, filled up with silence."""
        import numpy as np  # lazy

        options = _magnitude_options(settings)
        samples = resample(audio, options.rate, _MOST_SAMPLES)
        padded = np.zeros(-(-len(samples) // _SAMPLES_STEP) * _SAMPLES_STEP, np.float32)
        padded[: len(samples)] = samples
        if len(padded) <= options.window:
            raise InputError(
                f"the audio has {len(samples)} samples at {options.rate} Hz; the model needs more than "
                f"{options.window // _SAMPLES_STEP * _SAMPLES_STEP}",
                param="multi_modal_data",
            )
        features = log_magnitudes(padded, options)
        mask = np.arange(0, len(padded), options.hop)[: len(features)] < len(samples)
        return {"input_features": features[None], "input_features_mask": mask[None]}

    def _item(self, modality: str, arrays: dict[str, Any]) -> ProcessedItem:
        return ProcessedItem(arrays, self.embeds_text(modality, self.nums[modality]), self.nums[modality])

    def embeds_text(self, modality: str, num: int) -> str:
        if num != self.nums[modality]:
            raise InputError(f"{modality} embeddings have {num} vectors; this model has {self.nums[modality]} per item")
        return f"\n\n<start_of_{modality}>{self.placeholders[modality] * num}<end_of_{modality}>\n\n"


def _magnitude_options(settings: Settings) -> MagnitudeOptions:
    rate = settings.whole("sampling_rate", high=768_000)
    window, hop = (round(rate * settings.number(f"{name}_length_ms", 1) / 1000) for name in ("frame", "hop"))
    lowest, highest = settings.number("min_frequency", 125.0), settings.number("max_frequency", 7600.0)
    if not 2 <= window <= 1 << 16 or not 1 <= hop <= 1 << 16 or lowest >= highest:
        raise InputError(
            f"the feature extractor has frames of {window} samples every {hop}, from {lowest:g} to {highest:g} Hz: "
            "expected 2 to 65536 samples, every 1 to 65536, and min_frequency below max_frequency"
        )
    for name in ("per_bin_mean", "per_bin_stddev", "dither"):
        if settings.get(name):
            raise InputError(f"{name} of the feature extractor is not built for this model")
    if not settings.flag("preemphasis_htk_flavor", True) or settings.number("input_scale_factor", 1.0) != 1.0:
        raise InputError("preemphasis_htk_flavor=false and input_scale_factor of the feature extractor are not built")
    size = 1 << (window - 1).bit_length() << settings.flag("fft_overdrive", True)
    bins = settings.whole("feature_size", high=1024)
    check_transforms(_MOST_SAMPLES // hop + 1, size, bins)
    return MagnitudeOptions(
        bins=bins, rate=rate, window=window, hop=hop, size=size, lowest=lowest,
        highest=highest, emphasis=settings.number("preemphasis", 0.97), floor=settings.number("mel_floor", 1e-5),
    )  # fmt: skip


class PaliGemma(Family):
    """The text follows a beginning-of-text token after the last image, and a line end follows the text."""

    placeholders = {"image": "<image>"}
    fixed = ("size",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.numbers("vision_config")
        side = vision.whole("image_size", 224, high=_MOST_SIDE)
        patch = vision.whole("patch_size", 14, high=side)
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

    def embeds_text(self, modality: str, num: int) -> str:
        if num != self.num:
            raise InputError(f"image embeddings have {num} vectors; this model has {self.num} per image")
        return self.placeholders[modality] * num

    def lay_out(self, text: str) -> str:
        token = self.placeholders["image"]
        if token not in text:
            raise InputError(f"a prompt of this model begins with {token}, once for each image", param="prompt")
        end = text.rfind(token) + len(token)
        if text[end:].startswith("<bos>"):
            return text
        return f"{text[:end]}<bos>{text[end:]}\n"
