"""Phi-4-multimodal: images as a grid of crops with the padding masked, audio as filter banks. Its own repository
(Phi4MM) has other tokens, and numbers items where a prompt names them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.audio import Audio, resample
from quire.media.families.base import BICUBIC, BILINEAR, HALF, FamilyByModality, ProcessedItem
from quire.media.images import check_size
from quire.media.mel import BankOptions, check_transforms, log_banks
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_CROPS = 64
_MOST_TRANSFORM = 1 << 13
_MOST_NUMBERS = 1 << 30  # of all transforms: hours of audio, with the released geometry
_SHORTEST = 10  # pixels of a side of the resized image
_IMAGE = {
    "size": {"height": 448, "width": 448}, "patch_size": 14, "dynamic_hd": 36, "resample": BICUBIC, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True, "image_mean": HALF, "image_std": HALF,
}  # fmt: skip
_AUDIO = {
    "feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400, "preemphasis": 0.97,
    "audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1, "mel_min_frequency": 0,
    "mel_max_frequency": 7690,
}  # fmt: skip
_NUMBERED = re.compile(r"<\|(image|audio)_\d+\|>")


class Phi4Multimodal(FamilyByModality):
    placeholders = {"image": "<|image|>", "audio": "<|audio|>"}
    embeds_by_count = ("image", "audio")
    regards = {"audio": "image"}  # another projection

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", _IMAGE, "do_resize")
        own = files.processor.get("audio_processor")
        self._own["audio"] = Settings.of(_AUDIO, own if isinstance(own, Mapping) else files.parts.get("audio", {}))

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image, "audio": self._audio}

    def _image(self, image: Image, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        patch = settings.whole("patch_size", high=1024)
        side = settings.box("size")[0]
        if side < patch:
            raise InputError(f"size is {side}, less than a patch ({patch} pixels)", param="mm_processor_kwargs")
        columns, rows = crops_of((image.height, image.width), side, settings.whole("dynamic_hd", high=_MOST_CROPS))
        large, mask = _fitted(image, (rows, columns), side, patch)
        levels = settings.levels().apply(large)
        whole = pixels.sampled(levels, (side, side))
        masks = [np.ones((side // patch,) * 2, np.float32), *pixels.tiles(mask, (side // patch,) * 2)]
        half = -(-(side // patch) // 2)
        quarters: Array = np.stack(masks[1:])[:, ::2, ::2].reshape(rows, columns, half, half)
        quarters = quarters.transpose(0, 2, 1, 3).reshape(rows * half, columns * half)
        num = int(quarters.sum() + quarters[:, 0].sum()) + 1 + half * (half + 1)
        arrays = {
            "image_pixel_values": np.stack([whole, *pixels.tiles(levels, (side, side))])[None],
            "image_sizes": np.array([[rows * side, columns * side]], np.int64),
            "image_attention_mask": np.stack(masks)[None],
        }
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _audio(self, audio: Audio, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        options = _bank_options(settings)
        samples = resample(audio, options.rate)
        if len(samples) < options.window:
            raise InputError(
                f"the audio has {len(samples)} samples at {options.rate} Hz; the model needs {options.window} at least",
                param="multi_modal_data",
            )
        check_transforms(len(samples) // options.hop, options.size, options.bins, _MOST_NUMBERS)
        features = log_banks(samples, options)
        num = len(features) * settings.whole("audio_feat_stride", high=64)
        for name in ("audio_compression_rate", "audio_downsample_rate"):
            num = -(-num // settings.whole(name, high=1 << 10))
        arrays = {"audio_input_features": features[None], "audio_embed_sizes": np.array([num], np.int64)}
        return ProcessedItem(arrays, self.placeholders["audio"] * num, num)


class Phi4MM(Phi4Multimodal):
    """The numbers of items say nothing: they are taken in their order."""

    placeholders = {"image": "<|endoftext10|>", "audio": "<|endoftext11|>"}

    def written(self, modality: str, number: int) -> str:
        return f"<|{modality}_{number}|>"

    def lay_out(self, text: str) -> str:
        return _NUMBERED.sub(lambda match: self.placeholders[match[1]], text)


def _bank_options(settings: Settings) -> BankOptions:
    size = settings.whole("n_fft", low=2, high=_MOST_TRANSFORM)
    lowest = settings.number("mel_min_frequency", 0.0) if settings.get("mel_min_frequency") else 0.0
    highest = settings.number("mel_max_frequency", 7690)
    if lowest >= highest:
        raise InputError(f"mel_min_frequency is {lowest}, not below mel_max_frequency, which is {highest}")
    return BankOptions(
        bins=settings.whole("feature_size", high=1024), rate=settings.whole("sampling_rate", high=768_000),
        window=settings.whole("win_length", low=2, high=size), hop=settings.whole("hop_length", high=1 << 16),
        size=size, lowest=lowest, highest=highest, emphasis=settings.number("preemphasis", 0.97),
    )  # fmt: skip


def crops_of(size: Size, side: int, most: int) -> tuple[int, int]:
    """(columns, rows): as many as the image covers, or, of those allowed, the ones nearest to its proportions."""
    columns, rows = math.ceil(size[1] / side), math.ceil(size[0] / side)
    return (columns, rows) if columns * rows <= most else pixels.grid_of(size, (side, side), 1, most)


def _fitted(image: Image, grid: Size, side: int, patch: int) -> tuple[Array, Array]:
    """The image in the upper left corner of a white canvas of crops, and which patches have any of the image."""
    import numpy as np  # lazy

    tall, wide = grid[0] * side, grid[1] * side
    by_width, by_height = wide / image.width, tall / image.height
    size = (int(image.height * by_width), wide) if by_width < by_height else (tall, int(image.width * by_height))
    if min(size) < _SHORTEST:
        raise InputError(
            f"an image of {image.width}x{image.height} pixels is too narrow: its shorter side would have {min(size)} "
            f"pixels, and {_SHORTEST} are needed",
            param="multi_modal_data",
        )
    check_size(wide, tall)
    canvas = np.full((3, tall, wide), 255, np.uint8)
    canvas[:, : size[0], : size[1]] = pixels.planes(pixels.resize(image, size, BILINEAR))
    mask = np.ones((grid[0] * (side // patch), grid[1] * (side // patch)), np.float32)
    below, beside = (tall - size[0]) // patch, (wide - size[1]) // patch
    if beside:
        mask[:, -beside:] = 0
    if below:
        mask[-below:, :] = 0
    return canvas, mask
