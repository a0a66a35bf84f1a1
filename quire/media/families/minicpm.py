"""MiniCPM-V, MiniCPM-o and MiniCPM-OCR: an image as a whole and, if it is large, as slices of about the same size,
between marks. Videos are frames; in MiniCPM-V 4.5 each has its time, and several may be seen at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.checkpoint.minicpm import release_of
from quire.media import pixels
from quire.media.audio import Audio, resample
from quire.media.families.base import BICUBIC, BY_SIZES, HALF, EmbedsLayout, FamilyByModality, Numbers, ProcessedItem
from quire.media.families.speech import EXTRACTOR, WhisperFeatures, num_bins
from quire.media.images import check_crops, check_frames
from quire.media.pixels import Array, Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import CheckpointError, InputError, NotBuiltError

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.video import Video

_STEPS: Mapping[str, Any] = {
    "max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "slice_mode": True, "use_image_id": True,
    "image_mean": HALF, "image_std": HALF, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "resample": BICUBIC,
}  # fmt: skip
_MOST_PIECES, _MOST_SIDE, _MOST_VECTORS = 64, 4096, 4096
_MOST_PACKED = 6  # frames that are seen at once
_TICKS = 10  # of a second: what times are counted in
_LAST_TIME = 1 << 24
_FRAMES_PER_SECOND = 100  # of what is heard
_OLD_NAMES = {"norm_mean": "image_mean", "norm_std": "image_std"}


class Slicing(NamedTuple):
    """Sizes in pixels. Slices of the image resized to `fine` are in `grid` rows and columns; None: only the whole."""

    whole: Size
    grid: Size | None = None
    fine: Size = (0, 0)

    @property
    def piece(self) -> Size:
        rows, columns = self.grid or (1, 1)
        return self.fine[0] // rows, self.fine[1] // columns

    @property
    def sizes(self) -> list[Size]:
        rows, columns = self.grid or (0, 0)
        return [self.whole, *[self.piece] * (rows * columns)]


def pieces_of(size: Size, side: int, most: int, step: int, enlarges: bool = True) -> Slicing:
    """Of an image of this size: pieces have about side x side pixels and sides that `step` divides. `enlarges`: a small
    image too."""
    grid = grid_of(size, side, most)
    if grid is None:
        return Slicing(_near(size, side, step, enlarges))
    rows, columns = grid
    height, width = (_rounded(length, num) / num for length, num in zip(size, grid, strict=True))
    tall, wide = _near((height, width), side, step, True)
    return Slicing(_near(size, side, step, False), grid, (tall * rows, wide * columns))


def grid_of(size: Size, side: int, most: int) -> Size | None:
    """(rows, columns) of slices, as many as have the image's pixels, or one more or less, with the proportions that are
    nearest the image's. None: one is enough."""
    height, width = size
    num = min(math.ceil(height * width / (side * side)), most)
    if num <= 1:
        return None
    choices = [
        (count // columns, columns)
        for count in (num - 1, num, num + 1)
        if 1 < count <= most
        for columns in range(1, count + 1)
        if count % columns == 0
    ]
    ratio = math.log(width / height)
    return min(choices, key=lambda grid: abs(ratio - math.log(grid[1] / grid[0])))


def _near(size: tuple[float, float], side: int, step: int, enlarges: bool) -> Size:
    height, width = size
    if enlarges or height * width > side * side:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _rounded(height, step), _rounded(width, step)


def _rounded(length: float, step: int) -> int:
    return max(round(length / step), 1) * step


class _Sliced(FamilyByModality):
    """What they have in common."""

    fixed = ("scale_resolution", "downsample_mode")
    beside_embeds = BY_SIZES
    start, end = "<image>", "</image>"
    slice_start, slice_end = "<slice>", "</slice>"
    id_start, id_end = "<image_id>", "</image_id>"

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image}

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        settings = self._own["image"].over(options)
        pieces = self._pieces(size, settings)
        text, num = self._image_text(pieces, settings)
        return EmbedsLayout(text, num, {"target_sizes": self._sizes([pieces], settings)})

    def count_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> int:
        return self._given(modality, numbers, options).num_vectors

    def lay_out_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        layout = self._given(modality, numbers, options)
        return layout.text, layout.arrays

    def _given(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> EmbedsLayout:
        wide_tall = list(map(int, numbers[f"{'video_' if modality == 'video' else ''}image_sizes"]))
        sizes = list(zip(wide_tall[1::2], wide_tall[::2], strict=True))
        if modality == "image":
            return self.layout_of(sizes[0], options)
        settings = self._own["video"].over(options)
        return self._video_layout([self._pieces(size, settings) for size in sizes], settings)

    def _video_layout(self, frames: list[Slicing], settings: Settings) -> EmbedsLayout:
        raise NotImplementedError

    def _sizes(self, frames: Sequence[Slicing], settings: Settings) -> Array:
        """In patches, of all pieces."""
        import numpy as np  # lazy

        patch = settings.whole("patch_size", high=1024)
        sizes = [(height // patch, width // patch) for pieces in frames for height, width in pieces.sizes]
        return np.array(sizes, np.int64)

    def numbered(self, modality: str, number: int, text: str) -> str:
        first = self._id(0)
        return self._id(number) + text.removeprefix(first) if text.startswith(first) else text

    def _id(self, number: int) -> str:
        return f"{self.id_start}{number}{self.id_end}"

    def step(self, settings: Settings) -> int:
        """Pixels that divide the sides of pieces."""
        return settings.whole("patch_size", high=1024)

    def enlarges(self, settings: Settings) -> bool:
        return True

    def count(self, size: Size, settings: Settings) -> int:
        """Vectors of a piece of this size, in pixels."""
        raise NotImplementedError

    def _pieces(self, size: Size, settings: Settings) -> Slicing:
        side = settings.whole("scale_resolution", high=_MOST_SIDE)
        most = settings.whole("max_slice_nums", high=_MOST_PIECES)
        most = most if settings.flag("slice_mode", True) else 1
        return pieces_of(size, side, most, self.step(settings), self.enlarges(settings))

    def _image(self, image: Image, settings: Settings) -> ProcessedItem:
        pieces = self._pieces((image.height, image.width), settings)
        check_crops(pieces.sizes, "max_slice_nums")
        text, num = self._image_text(pieces, settings)
        return ProcessedItem(_arrays(_cut(image, pieces, settings), settings), text, num)

    def _image_text(self, pieces: Slicing, settings: Settings) -> tuple[str, int]:
        """And how many vectors it has."""
        text = self._text(pieces, settings, self.feature("image"))
        if settings.flag("use_image_id", True):
            text = self._id(0) + text
        return text, sum(self.count(size, settings) for size in pieces.sizes)

    def _frames(self, video: Video, settings: Settings) -> tuple[list[Slicing], list[Array]]:
        """How each is cut, and the pieces of all."""
        frames = [self._pieces((frame.height, frame.width), settings) for frame in video.frames]
        check_frames([size for pieces in frames for size in pieces.sizes])
        made = zip(video.frames, frames, strict=True)
        return frames, [piece for frame, pieces in made for piece in _cut(frame, pieces, settings)]

    def _text(self, pieces: Slicing, settings: Settings, token: str) -> str:
        whole = f"{self.start}{token * self.count(pieces.whole, settings)}{self.end}"
        if pieces.grid is None:
            return whole
        rows, columns = pieces.grid
        piece = f"{self.slice_start}{token * self.count(pieces.piece, settings)}{self.slice_end}"
        return whole + "\n".join([piece * columns] * rows)


def _cut(image: Image, pieces: Slicing, settings: Settings) -> list[Array]:
    filter_ = settings.filter(BICUBIC)
    whole = pixels.planes(pixels.resize(image, pieces.whole, filter_))
    if pieces.grid is None:
        return [whole]
    fine = pixels.planes(pixels.resize(image, pieces.fine, filter_))
    return [whole, *pixels.tiles(fine, pieces.piece)]


def _arrays(pieces: Sequence[Array], settings: Settings) -> dict[str, Any]:
    """Patches of all pieces beside each other, row by row: (1, channels, patch, patches * patch)."""
    import numpy as np  # lazy

    patch, strips = settings.whole("patch_size", high=1024), []
    for planes in pieces:
        channels, height, width = planes.shape
        split = planes.reshape(channels, height // patch, patch, width // patch, patch)
        strips.append(split.transpose(0, 2, 1, 3, 4).reshape(channels, patch, -1))
    sizes = [(planes.shape[1] // patch, planes.shape[2] // patch) for planes in pieces]
    pixel_values = settings.levels().apply(np.concatenate(strips, -1)[None])
    return {"pixel_values": pixel_values, "target_sizes": np.array(sizes, np.int64)}


class MiniCPMV(_Sliced):
    """2.5 to 4.5: every piece has as many vectors."""

    placeholders = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}

    def __init__(self, files: ProcessorFiles) -> None:
        own = files.parts.get("image", {})
        known = {_OLD_NAMES.get(name, name): value for name, value in own.items()}
        known = {name: value for name, value in known.items() if name in _STEPS}
        audio = {name: own[name] for name in EXTRACTOR if name in own}
        super().__init__(dataclasses.replace(files, parts={"image": known, "video": known, "audio": audio}))
        self.release = release_of(files.config)
        self.num = _vectors(files.config, own)
        token = _mark(own, "unk", "<unk>")
        self.features = {"image": token, "video": token}
        self.start, self.end = _mark(own, "im_start", self.start), _mark(own, "im_end", self.end)
        self.slice_start = _mark(own, "slice_start", self.slice_start)
        self.slice_end = _mark(own, "slice_end", self.slice_end)
        self.id_start, self.id_end = _mark(own, "im_id_start", self.id_start), _mark(own, "im_id_end", self.id_end)
        numbers = bool(files.config.get("use_image_id", True)) and self.release != "2.5"
        self.image = self.settings("image", {**_STEPS, "use_image_id": numbers})
        if self.release == "2.5":
            self.placeholders = {"image": self.placeholders["image"]}
            return
        video = Settings.of(_STEPS, {**known, "max_slice_nums": 1, "use_image_id": False})
        packs = {"packing_nums": 1} if self.release == "4.5" else {}
        self.video = self._own["video"] = Settings.of(video.values, packs)

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image, "video": self._video}

    def count(self, size: Size, settings: Settings) -> int:
        return self.num

    def _text(self, pieces: Slicing, settings: Settings, token: str) -> str:
        if self.release != "2.5" or pieces.grid is None:
            return super()._text(pieces, settings, token)
        rows, columns = pieces.grid
        piece = f"{self.start}{token * self.num}{self.end}"
        return piece + self.slice_start + "\n".join([piece * columns] * rows) + self.slice_end

    def _video(self, video: Video, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        frames, cut = self._frames(video, settings)
        arrays, packed = _arrays(cut, settings), settings.whole("packing_nums", 1, high=_MOST_PACKED)
        if packed > 1 and not video.fps:
            raise _not_packed(packed)
        text, num, _ = self._video_layout(frames, settings)
        if self.release == "4.5" and video.fps and len(cut) == len(frames):
            packs = [min(packed, len(cut) - start) for start in range(0, len(cut), packed)]
            times = [_time(index, video.fps) for index in video.indices]
            arrays |= {"temporal_ids": np.array(times, np.int64), "packs": np.array(packs, np.int64)}
        return ProcessedItem(arrays, text, num)

    def _video_layout(self, frames: list[Slicing], settings: Settings) -> EmbedsLayout:
        """Of frames that are seen at once there is one text."""
        packed, num = settings.whole("packing_nums", 1, high=_MOST_PACKED), sum(len(one.sizes) for one in frames)
        if packed > 1 and num != len(frames):
            raise _not_packed(packed)
        texts = [self._text(pieces, settings, self.feature("video")) for pieces in frames[::packed]]
        num = -(-num // packed) * self.num
        return EmbedsLayout("\n".join(texts), num, {"target_sizes": self._sizes(frames, settings)})


def _not_packed(packed: int) -> InputError:
    return InputError(
        f"packing_nums = {packed}: frames that are seen at once are not cut into pieces (max_slice_nums), and "
        "the video tells its frames per second",
        param="packing_nums",
    )


def _time(index: int, fps: float) -> int:
    if not 0 <= index * _TICKS <= _LAST_TIME * fps:
        raise InputError(
            f"frame {index!r:.60} of a video of {fps} frames per second is not between 0 and {_LAST_TIME / _TICKS} s",
            param="multi_modal_data",
        )
    return round(index / fps * _TICKS)


def _vectors(config: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    num = Settings({"query_num": config.get("query_num")}).whole("query_num", 64, high=_MOST_VECTORS)
    written = own.get("image_feature_size", num)
    if written != num:
        raise CheckpointError(
            f"image_feature_size of the media processor is {written!r:.60} and query_num of the model is {num}: they "
            "must be equal",
            param="image_feature_size",
        )
    return num


def _mark(own: Mapping[str, Any], name: str, default: str) -> str:
    value = own.get(name, default)
    if not isinstance(value, str) or not 0 < len(value) <= 100:
        raise CheckpointError(f"{name} of the media processor must be a token, got {value!r:.60}", param=name)
    return value


class MiniCPMO(MiniCPMV):
    """MiniCPM-V 2.6 that hears: half minutes are encoded by themselves, and the vectors of each second stand between
    marks."""

    audio_start, audio_end = "<|audio_start|>", "<|audio_end|>"

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.placeholders = {**self.placeholders, "audio": "(<audio>./</audio>)"}
        self.features = {**self.features, "audio": self.features["image"]}
        numbers = files.numbers()
        self.pool = numbers.whole("audio_pool_step", 2, high=64)
        bins = num_bins(files.numbers("audio_config"), 80)
        self.audio = self.settings("audio", {**EXTRACTOR, "feature_size": bins}, *_STEPS, "packing_nums")
        self.hearing = WhisperFeatures(self.audio)

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {**super().methods(), "audio": self._audio}

    def embeds_text(self, modality: str, num: int) -> str:
        return self._heard(num) if modality == "audio" else super().embeds_text(modality, num)

    def _audio(self, audio: Audio, settings: Settings) -> ProcessedItem:
        import numpy as np  # lazy

        hearing = self.hearing if settings is self.audio else WhisperFeatures(settings)
        rate, most = hearing.mel.rate, hearing.num_samples
        samples = resample(audio, rate)
        parts = []
        for start in range(0, len(samples), most):
            features, mask = hearing.of(Audio(samples[start : start + most], rate))
            parts.append(features[0, :, : int(mask.sum())])
        lens = [part.shape[-1] for part in parts]
        pieces = np.zeros((len(parts), hearing.mel.bins, max(lens, default=1)), np.float32)
        for piece, part in zip(pieces, parts, strict=True):
            piece[:, : part.shape[-1]] = part
        num = sum(self._vectors_of(count) for count in lens)
        arrays = {"input_features": pieces, "piece_lens": np.array(lens, np.int64)}
        return ProcessedItem(arrays, self._heard(num), num)

    def _vectors_of(self, frames: int) -> int:
        return ((frames - 1) // 2 + 1) // self.pool

    def _heard(self, num: int) -> str:
        second = max(1, self._vectors_of(_FRAMES_PER_SECOND))
        counts = [min(second, num - start) for start in range(0, num, second)]
        token = self.feature("audio")
        return "".join(f"{self.audio_start}{token * count}{self.audio_end}" for count in counts)


class MiniCPMV46(_Sliced):
    """4.6: neighbouring patches become one vector."""

    placeholders = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    mode = "16x"
    numbers_videos = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        mode = files.config.get("downsample_mode") or self.mode
        steps = {**_STEPS, "downsample_mode": mode, "do_resize": True, "do_convert_rgb": True}
        self.image = self.settings("image", steps, "small_image_upsize")
        self.video = self.settings("video", {**steps, "stack_frames": 1}, "small_image_upsize")

    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]:
        return {"image": self._image, "video": self._video}

    def _merge(self, settings: Settings) -> int:
        """Patches along a side of what becomes one vector."""
        mode = settings.get("downsample_mode")
        if mode not in ("4x", "16x"):
            raise InputError(f"downsample_mode of the media processor must be '4x' or '16x', got {mode!r:.60}",
                             param="downsample_mode")  # fmt: skip
        return 2 if mode == "4x" else 4

    def step(self, settings: Settings) -> int:
        return super().step(settings) * self._merge(settings)

    def enlarges(self, settings: Settings) -> bool:
        how = settings.get("small_image_upsize", "always")
        if how not in ("always", "never"):
            raise NotBuiltError(f"small_image_upsize = {how!r:.60} is not built; 'always' and 'never' are",
                                param="small_image_upsize")  # fmt: skip
        return bool(how == "always")

    def count(self, size: Size, settings: Settings) -> int:
        step = self.step(settings)
        return (size[0] // step) * (size[1] // step)

    def _pieces(self, size: Size, settings: Settings) -> Slicing:
        if not settings.flag("do_resize", True):
            raise NotBuiltError("do_resize = false is not built for this model", param="do_resize")
        return super()._pieces(size, settings)

    def _video(self, video: Video, settings: Settings) -> ProcessedItem:
        """Frames as images, one after another, under one number."""
        if settings.whole("stack_frames", 1, high=_MOST_PIECES) != 1:
            raise NotBuiltError("stack_frames other than 1 are not built for this model", param="stack_frames")
        frames, cut = self._frames(video, settings)
        text, num, _ = self._video_layout(frames, settings)
        return ProcessedItem({f"{name}_videos": array for name, array in _arrays(cut, settings).items()}, text, num)

    def _video_layout(self, frames: list[Slicing], settings: Settings) -> EmbedsLayout:
        text = "".join(self._text(pieces, settings, self.feature("video")) for pieces in frames)
        if self.numbers_videos and settings.flag("use_image_id", True):
            text = self._id(0) + text
        num = sum(self.count(size, settings) for pieces in frames for size in pieces.sizes)
        return EmbedsLayout(text, num, {"target_sizes_videos": self._sizes(frames, settings)})


class MiniCPMV47(MiniCPMV46):
    reads_marks = True
    numbers_videos = False


class MiniCPMOcr(MiniCPMV46):
    mode = "4x"
