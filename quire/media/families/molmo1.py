"""The first Molmo: an image whole and in crops that overlap, proportions kept, what is left over black.

Vectors are made of squares of two by two patches. An image stands before the text of its prompt, which is a dialogue
of "User:" and "Assistant:" after a space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import CLIP_MEAN, CLIP_STD, Family, ProcessedItem
from quire.media.families.molmo import MOST_CROPS, MOST_SIDE, PATCH, flattened, grid_text, overlapped, tiling_of, two_of
from quire.media.images import check_crops
from quire.media.pixels import Array, Levels, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = {
    "base_image_input_size": [336, 336], "image_patch_size": 14, "image_token_length_h": 12, "image_token_length_w": 12,
    "max_crops": 12, "overlap_margins": [4, 4], "image_padding_mask": True, "do_normalize": True,
    "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
}  # fmt: skip
_POOL = 2  # patches of a square, along a side
_ENDS = ("<im_start>", "<im_end>")
_USER, _ASSISTANT = "User:", " Assistant:"
WHOLE, EMPTY, PARTIAL = range(3)  # how much of a patch is black around the image: nothing, all, some


class Molmo(Family):
    placeholders = {"image": "<|image|>"}
    features = {"image": PATCH}
    fixed = (
        "base_image_input_size", "image_patch_size", "image_token_length_h", "image_token_length_w", "overlap_margins",
        "image_padding_mask",
    )  # fmt: skip
    tells_tokens = True
    begins_text = True
    items_first = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", _STEPS)

    def lay_out(self, text: str) -> str:
        """A text that is no dialogue yet becomes what the user says."""
        token = self.placeholders["image"]
        end = text.rfind(token) + len(token) if token in text else 0
        words = text[end:]
        if not words.lstrip().startswith(_USER):
            words = f"{_USER} {words}{_ASSISTANT}"
        return f"{text[:end]} {words.lstrip()}"

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        side, patch = _geometry(settings)
        each, margins = side // patch, _margins(settings, side // patch)
        margin = sum(margins) * patch
        most = settings.whole("max_crops", high=MOST_CROPS)
        grid = tiling_of((value.height, value.width), side - margin, margin, most)
        check_crops([(side, side)] * (1 + grid[0] * grid[1]), "max_crops")
        planes, levels = pixels.planes(value), settings.levels()
        whole, _ = _framed(planes, (side, side), patch, levels)
        canvas, padding = _framed(planes, (grid[0] * (side - margin) + margin, grid[1] * (side - margin) + margin),
                                  patch, levels)  # fmt: skip
        crops = np.stack([whole, *_cut(canvas, grid, side, side - margin)])
        paddings = [part.reshape(-1) for part in _cut(padding, grid, each, each - sum(margins))]
        num, halves = each // _POOL, (margins[0] // _POOL, margins[1] // _POOL)
        parts = overlapped(grid, num, halves)
        arrays = {
            "pixel_values": flattened(crops, patch),
            # As released: those of the crops, and then one of which all is PARTIAL, although the whole image stands
            # before its crops. So each is told what is padding in the next.
            "patch_padding": np.stack([*paddings, np.full(each * each, PARTIAL, np.int64)]),
            "square_order": np.concatenate([np.arange(num * num), parts.reshape(-1) + num * num]).astype(np.int64),
        }
        text = grid_text((num, num), _ENDS, True) + grid_text((parts.shape[0], parts.shape[1]), _ENDS, True)
        return ProcessedItem(arrays, text, num * num + parts.size)


def _geometry(settings: Settings) -> Size:
    """Pixels of a crop's side, and of a patch's."""
    (height, width), patch = (
        two_of(settings, "base_image_input_size", 1, MOST_SIDE),
        settings.whole("image_patch_size", high=1024),
    )
    if height != width or height % (_POOL * patch):
        raise InputError(
            f"base_image_input_size must be a square of an even number of patches of {patch} pixels a side; got "
            f"{height}x{width}",
            param="base_image_input_size",
        )
    squares = height // (_POOL * patch)
    for name in ("image_token_length_h", "image_token_length_w"):
        if (own := settings.whole(name, high=MOST_SIDE)) != squares:
            raise InputError(f"{name} is {own}; a crop of {height} pixels has {squares} squares a side", param=name)
    if not settings.flag("image_padding_mask", True):
        raise InputError("image_padding_mask must be true: the encoder is told what is padding")
    return height, patch


def _margins(settings: Settings, each: int) -> Size:
    """Patches of a crop, at its beginning and its end, that are another crop's."""
    margins = two_of(settings, "overlap_margins", 0, MOST_SIDE)
    if sum(margins) >= each or any(one % _POOL for one in margins):
        raise InputError(
            f"overlap_margins must be even numbers of patches, together less than the {each} of a crop; got "
            f"{margins[0]} and {margins[1]}",
            param="overlap_margins",
        )
    return margins


def _framed(planes: Array, target: Size, patch: int, levels: Levels) -> tuple[Array, Array]:
    """(channels, *target) of levels: the image in the middle, black around it. And of each patch, [rows, columns],
    whether it is WHOLE, EMPTY or PARTIAL."""
    import numpy as np  # lazy

    size = _fitted(planes.shape[-2:], target)
    top, left = (target[0] - size[0]) // 2, (target[1] - size[1]) // 2
    canvas = np.zeros((len(planes), *target), np.float32)
    canvas[:, top : top + size[0], left : left + size[1]] = pixels.averaged(planes, size)
    if levels.mean is not None and levels.std is not None:
        canvas -= np.array(levels.mean, np.float32)[:, None, None]
        canvas /= np.array(levels.std, np.float32)[:, None, None]
    rows, columns = _covered(top, size[0], target[0], patch), _covered(left, size[1], target[1], patch)
    covered = rows[:, None] * columns[None]
    padding = np.where(covered == patch * patch, WHOLE, np.where(covered == 0, EMPTY, PARTIAL))
    return canvas, padding.astype(np.int64)


def _fitted(size: Size, target: Size) -> Size:
    """Within `target` and with the same proportions, in float32 as released."""
    import numpy as np  # lazy

    scale = min(np.float32(there) / np.float32(here) for here, there in zip(size, target, strict=True))
    height, width = (
        min(max(1, int(np.float32(here) * scale)), there) for here, there in zip(size, target, strict=True)
    )
    return height, width


def _covered(first: int, num: int, length: int, patch: int) -> Array:
    """Of each step of `patch` along a side, how many pixels lie among the `num` from `first` on."""
    import numpy as np  # lazy

    starts = np.arange(0, length, patch)
    covered: Array = np.clip(np.minimum(starts + patch, first + num) - np.maximum(starts, first), 0, patch)
    return covered


def _cut(plane: Array, grid: Size, side: int, step: int) -> list[Array]:
    """Squares of the last two dimensions, row by row, one each `step`."""
    return [
        plane[..., top * step : top * step + side, left * step : left * step + side]
        for top in range(grid[0])
        for left in range(grid[1])
    ]
