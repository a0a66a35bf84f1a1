"""Long audio as clips that a model can hear, cut where it is quiet.

In: samples at the model's rate. Out: clips, one after the other, that together are all of them. A cut lies within the
last `overlap_chunk_second` seconds that a clip may have, in the window with the least energy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.schema.errors import InputError

if TYPE_CHECKING:
    from quire.config import SpeechToTextConfig
    from quire.media.audio import Samples

_STEPS = 4  # places per window that are tried


class Clip(NamedTuple):
    samples: Samples
    start: float  # seconds into the audio
    seconds: float


def cut_into_clips(samples: Samples, config: SpeechToTextConfig) -> list[Clip]:
    """Views of the samples."""
    rate = int(config.sample_rate)
    if config.max_audio_clip_s is None:
        return [Clip(samples, 0.0, len(samples) / rate)]
    longest = config.max_audio_clip_s * rate
    if len(samples) > longest and not config.allow_audio_chunking:
        raise InputError(
            f"the audio lasts {len(samples) / rate:.1f} s; this model takes {config.max_audio_clip_s} s", param="file"
        )
    clips, begin = [], 0
    while len(samples) - begin > longest:
        last = begin + longest
        first = max(last - config.overlap_chunk_second * rate, begin + 1)
        end = quietest(samples, first, last, config.min_energy_split_window_size or 1)
        clips.append(Clip(samples[begin:end], begin / rate, (end - begin) / rate))
        begin = end
    clips.append(Clip(samples[begin:], begin / rate, (len(samples) - begin) / rate))
    return clips


def quietest(samples: Samples, first: int, last: int, window: int) -> int:
    """The middle of the window with the least energy between two places."""
    import numpy as np  # lazy

    part = samples[first:last].astype(np.float64)
    window = min(window, len(part))
    sums = np.concatenate([[0.0], np.cumsum(part * part)])
    begins = np.arange(0, len(part) - window + 1, max(1, window // _STEPS))
    energies = sums[begins + window] - sums[begins]
    return first + int(begins[int(energies.argmin())]) + window // 2
