"""GLM-4.1V, 4.5V and 4.6V: Qwen's patches; an image counts as the frames that are merged in time, and the time of each
pair of a video's frames is written behind it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.media import pixels
from quire.media.families.qwen import FPS, STEPS, TIMED, Qwen2VL, geometry
from quire.media.pixels import Size
from quire.media.settings import Settings
from quire.media.video import Video


class Glm4v(Qwen2VL):
    placeholders = {"image": "<|image|>", "video": "<|video|>"}
    features = {"video": "<|image|>"}
    image_edges = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    video_edges = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
    steps = STEPS
    prunes_video = False
    beside_embeds = TIMED

    def written(self, modality: str, number: int) -> str:
        return f"<|begin_of_{modality}|>{self.placeholders[modality]}<|end_of_{modality}|>"

    def _size(self, size: Size, settings: Settings, frames: int) -> Size:
        if not settings.flag("do_resize", True):
            return size
        patch, merge, depth = geometry(settings)
        size = pixels.at_least(size, patch * merge)
        return pixels.rounded_size(size, patch * merge, *self._limits(settings), frames=max(frames, depth), group=depth)

    def _times(self, video: Video, num: int, depth: int) -> Sequence[float]:
        times = [index / (video.fps or FPS) for index in video.indices][::2][:num]
        return times + times[-1:] * (num - len(times))

    def _video_text(self, times: Sequence[float], each: int) -> str:
        frame = f"<|begin_of_image|>{self.placeholders['image'] * each}<|end_of_image|>"
        return "".join(f"{frame}{self._time(time)}" for time in times)

    def _time(self, seconds: float) -> str:
        return str(int(seconds))


class Glm46V(Glm4v):
    def _time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"
