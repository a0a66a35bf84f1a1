"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos at about their own size, in patches that are merged two by
two; and models that take images in nearly the same way (VideoLLaMA 3, PaddleOCR-VL)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Beside,
    FamilyByModality,
    Numbers,
    ProcessedItem,
)
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.media.video import Video
from quire.schema.errors import InputError
from quire.schema.media import KEPT

if TYPE_CHECKING:
    from PIL.Image import Image

STEPS = {
    "do_resize": True,
    "resample": BICUBIC,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "do_convert_rgb": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_PIXELS = ("min_pixels", "max_pixels")
_FRAMES = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
FPS = 24.0  # of a video that does not say
_MOST_DEPTH = 4  # frames that are merged in time: the pixels of an image are repeated as often


_GRID = Beside(3, high=1 << 20)
_SECONDS = Beside(1, high=1 << 16, is_whole=False, is_optional=True)
_TIMES = Beside(1, high=1 << 20, is_whole=False, is_list=True)
TIMED: Mapping[str, Mapping[str, Beside]] = {
    "image": {"image_grid_thw": _GRID},
    "video": {"video_grid_thw": _GRID, "timestamps": _TIMES},
}
_LONGEST = 1 << 20  # seconds of a video


def geometry(settings: Settings) -> tuple[int, int, int]:
    """Pixels of a patch, patches along a side of what is merged, and frames."""
    patch, merge = settings.whole("patch_size", high=1024), settings.whole("merge_size", high=64)
    return patch, merge, settings.whole("temporal_patch_size", high=_MOST_DEPTH)


class Qwen2VL(FamilyByModality):
    placeholders = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    image_edges = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    video_edges = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    steps = STEPS
    prunes_video = True
    beside_embeds: Mapping[str, Mapping[str, Beside]] = {
        "image": {"image_grid_thw": _GRID},
        "video": {"video_grid_thw": _GRID, "second_per_grid_ts": _SECONDS},
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", {**self.steps, "size": self.image_edges}, *_PIXELS, *_FRAMES)
        self.video = self.settings("video", {**self.steps, "size": self.video_edges}, *_PIXELS, *_FRAMES)

    def written(self, modality: str, number: int) -> str:
        return f"<|vision_start|>{self.placeholders[modality]}<|vision_end|>"

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image, "video": self._video}

    def _image(self, image: Image, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        _, merge, _ = geometry(settings)
        size = self._size((image.height, image.width), settings, 1)
        flat, grid = self._patches(self._bytes([image], size, settings), settings)
        num = grid[1] * grid[2] // merge**2
        arrays = {"pixel_values": flat, "image_grid_thw": np.array([grid], np.int64), **self._further(settings)}
        return ProcessedItem(arrays, self.placeholders["image"] * num, num)

    def _further(self, settings: Settings) -> dict[str, Array]:
        """Of an image, what the encoder reads besides."""
        return {}

    def _video(self, video: Video, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        first, (patch, merge, depth) = video.frames[0], geometry(settings)
        size = self._size((first.height, first.width), settings, len(video.frames))
        bytes_ = self._bytes(video.frames, size, settings)
        flat, grid = self._patches(bytes_, settings)
        each = grid[1] * grid[2] // merge**2
        fps = self._used_fps(video)
        arrays = {
            "pixel_values_videos": flat,
            "video_grid_thw": np.array([grid], np.int64),
            "second_per_grid_ts": np.array([depth / fps], np.float32),
        }
        if self.prunes_video and self.video_pruning_rate:
            numbers = pixels.least_changed(bytes_, patch * merge, depth, self.video_pruning_rate)
            return ProcessedItem(arrays | {KEPT: numbers}, self.placeholders["video"] * len(numbers), len(numbers))
        return ProcessedItem(arrays, self._video_text(self._times(video, grid[0], depth), each), grid[0] * each)

    def _used_fps(self, video: Video) -> float:
        """Frames per second of the frames that are used."""
        if not video.fps:
            return 2.0
        return video.fps * len(video.frames) / max(video.total, 1)

    def _times(self, video: Video, num: int, depth: int) -> Sequence[float]:
        """Of as many frames as are left after merging."""
        return [0.0] * num

    def _video_text(self, times: Sequence[float], each: int) -> str:
        return self.placeholders["video"] * (len(times) * each)

    def count_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> int:
        name = f"{modality}_grid_thw"
        frames, height, width = map(int, numbers[name])
        _, merge, _ = geometry(self._own[modality].over(options))
        if height % merge or width % merge:
            raise InputError(
                f"{name} has {height} x {width} patches, of which {merge} x {merge} are merged",
                param="multi_modal_data",
            )
        if "timestamps" in numbers and len(numbers["timestamps"]) != frames:
            raise InputError(
                f"timestamps has {len(numbers['timestamps'])} numbers, and {name} has {frames} frames",
                param="multi_modal_data",
            )
        seconds = numbers.get("second_per_grid_ts", [0])[0]
        if frames * seconds > _LONGEST:
            raise InputError(
                f"second_per_grid_ts is {seconds!r:.60}: a video of {frames} times as many seconds is longer than "
                f"{_LONGEST}",
                param="multi_modal_data",
            )
        return frames * height * width // merge**2

    def lay_out_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        import numpy as np  # lazy

        name = f"{modality}_grid_thw"
        num, frames = self.count_embeds(modality, numbers, options), int(numbers[name][0])
        arrays = {name: np.array([numbers[name]], np.int64)}
        if "second_per_grid_ts" in numbers:
            arrays["second_per_grid_ts"] = np.array(numbers["second_per_grid_ts"], np.float32)
        if modality == "image":
            return self.placeholders["image"] * num, arrays
        return self._video_text(numbers.get("timestamps", [0.0] * frames), num // frames), arrays

    def _limits(self, settings: Settings) -> tuple[int, int]:
        edges = settings.edges("size")
        fewest = settings.whole("min_pixels", edges.get("shortest_edge", 1))
        return fewest, settings.whole("max_pixels", edges.get("longest_edge", 1 << 31))

    def _size(self, size: Size, settings: Settings, frames: int) -> Size:
        if not settings.flag("do_resize", True):
            return size
        patch, merge, _ = geometry(settings)
        return pixels.rounded_size(size, patch * merge, *self._limits(settings))

    def _bytes(self, frames: list[Image], size: Size, settings: Settings) -> Array:
        import numpy as np  # lazy

        return np.stack(pixels.resized_frames(frames, size, settings.filter(BICUBIC)))

    def _patches(self, bytes_: Array, settings: Settings) -> tuple[Array, tuple[int, int, int]]:
        import numpy as np  # lazy

        levels, num = settings.levels(), len(bytes_)
        patch, merge, depth = geometry(settings)
        # Bytes are put in order, a quarter of what floats are; and an image once, though it is its next frame too.
        channels = len(bytes_[0])
        flat, grid = pixels.patches(bytes_, patch, merge, 1 if num == 1 else depth)
        floats = levels.apply(flat.reshape(len(flat), channels, -1, patch))
        if num == 1 and depth > 1:
            floats = np.broadcast_to(floats[:, :, None], (len(flat), channels, depth, patch, patch))
        return floats.reshape(len(flat), -1), grid


class Qwen3VL(Qwen2VL):
    """Each pair of a video's frames has its time before it."""

    prunes_video = False
    beside_embeds = TIMED
    image_edges = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    video_edges = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    steps = {**STEPS, "patch_size": 16, "image_mean": HALF, "image_std": HALF}

    def _size(self, size: Size, settings: Settings, frames: int) -> Size:
        if frames == 1:
            return super()._size(size, settings, frames)
        patch, merge, depth = geometry(settings)
        size = pixels.at_least(size, patch * merge)
        fewest, most = self._limits(settings)
        return pixels.rounded_size(size, patch * merge, fewest, most, frames=frames, group=depth)

    def embeds_width(self, hidden_size: int) -> int:
        """With the vectors that are added after the first layers, behind those of the embedding."""
        levels = self.files.vision.get("deepstack_visual_indexes") or ()
        return hidden_size * (1 + len(levels))

    def _times(self, video: Video, num: int, depth: int) -> Sequence[float]:
        indices = list(video.indices)
        indices += indices[-1:] * (-len(indices) % depth)
        times = [index / (video.fps or FPS) for index in indices]
        return [(times[place * depth] + times[place * depth + depth - 1]) / 2 for place in range(num)]

    def _video_text(self, times: Sequence[float], each: int) -> str:
        frame = f"<|vision_start|>{self.placeholders['video'] * each}<|vision_end|>"
        return "".join(f"<{time:.1f} seconds>{frame}" for time in times)


class VideoLlama3(Qwen2VL):
    """Its images only: the frames of a video are thinned out by what they show, which is not built."""

    placeholders = {"image": "<|image_pad|>"}
    steps = {**STEPS, "image_mean": HALF, "image_std": HALF, "temporal_patch_size": 1, "merge_size": 1}

    def written(self, modality: str, number: int) -> str:
        return self.placeholders[modality]

    def _further(self, settings: Settings) -> dict[str, Array]:
        import numpy as np  # lazy

        return {"image_merge_sizes": np.array([settings.whole("merge_size")], np.int64)}


class PaddleOCRVL(Qwen2VL):
    """Patches are not flat, and lie in the order of the image: the projector merges them."""

    placeholders = {"image": "<|IMAGE_PLACEHOLDER|>"}
    image_edges = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}
    steps = {**STEPS, "temporal_patch_size": 1}

    def written(self, modality: str, number: int) -> str:
        return f"<|IMAGE_START|>{self.placeholders[modality]}<|IMAGE_END|>"

    def _size(self, size: Size, settings: Settings, frames: int) -> Size:
        (patch, merge, _), (height, width) = geometry(settings), size
        side = patch * merge
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return super()._size((height, width), settings, frames)

    def _patches(self, bytes_: Array, settings: Settings) -> tuple[Array, tuple[int, int, int]]:
        (patch, _, _), single = geometry(settings), Settings({**settings.values, "merge_size": 1}, settings.further)
        flat, grid = super()._patches(bytes_, single)
        return flat.reshape(len(flat), -1, patch, patch), grid
