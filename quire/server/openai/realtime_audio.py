"""Audio of a realtime session between its arrival and its transcription: utterances of PCM samples, and their clips.

In: samples of 16 bits as they come. Out: clips, each as long as the model hears, cut where it is quiet. A session's
audio is bounded in seconds. Must not know: events, engines.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections import deque
from typing import Any

from quire.config import SpeechToTextConfig
from quire.media.audio import Audio, resample
from quire.media.speech.clips import Clip, cut_into_clips
from quire.schema.errors import InputError

WIDTH = 2  # bytes of a sample
LEAST_SECONDS = 0.1  # of an utterance


@dataclasses.dataclass
class Utterance:
    """What is transcribed as one text."""

    item: str
    settings: Any  # of the session when it began
    rate: int
    longest: int  # samples of a clip
    pcm: bytearray = dataclasses.field(default_factory=bytearray)  # not yet taken by a clip
    num_samples: int = 0  # that ever came
    is_streamed: bool = False  # clips are taken before it is committed
    is_committed: bool = False
    num_clears: int = 0

    def add(self, data: bytes) -> None:
        self.pcm += data
        self.num_samples += len(data) // WIDTH

    def clear(self) -> None:
        """What no clip has taken."""
        self.num_samples -= len(self.pcm) // WIDTH
        self.pcm.clear()
        self.num_clears += 1

    @property
    def seconds(self) -> float:
        return self.num_samples / self.rate

    @property
    def is_ready(self) -> bool:
        """Whether the next clip is known."""
        return self.is_committed or (self.is_streamed and len(self.pcm) > self.longest * WIDTH)

    def head(self) -> bytes:
        """All that may decide the next clip."""
        return bytes(self.pcm[: (self.longest + 1) * WIDTH])

    def drop(self, clip: Clip) -> None:
        del self.pcm[: round(clip.seconds * self.rate) * WIDTH]


class Utterances:
    """Those of one session, oldest first; the last takes what comes, until it is committed."""

    def __init__(self) -> None:
        self._waiting: deque[Utterance] = deque()

    @property
    def first(self) -> Utterance | None:
        return self._waiting[0] if self._waiting else None

    @property
    def open(self) -> Utterance | None:
        """That takes what comes."""
        last = self._waiting[-1] if self._waiting else None
        return None if last is None or last.is_committed else last

    @property
    def seconds(self) -> float:
        """Of audio that waits."""
        return sum(len(one.pcm) / (WIDTH * one.rate) for one in self._waiting)

    @property
    def num_bytes(self) -> int:
        """The same in memory."""
        return sum(len(one.pcm) for one in self._waiting)

    def begin(self, utterance: Utterance) -> None:
        self._waiting.append(utterance)

    def remove(self, utterance: Utterance) -> None:
        self._waiting.remove(utterance)


def read_pcm(text: str | None) -> bytes:
    if text is None:
        raise InputError("audio is missing: samples of 16 bits, little-endian, one channel, in base64", param="audio")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise InputError(f"audio is not base64: {wrong}", param="audio") from None
    if len(data) % WIDTH:
        raise InputError(f"audio has {len(data)} bytes, which are not samples of {WIDTH * 8} bits", param="audio")
    return data


def next_clip(data: bytes, rate: int, config: SpeechToTextConfig) -> list[Clip]:
    """The first clip of these samples, at the model's rate. In a worker's thread."""
    import numpy as np  # lazy

    samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
    first = cut_into_clips(samples, dataclasses.replace(config, sample_rate=rate))[0]
    heard = resample(Audio(first.samples, rate), int(config.sample_rate))
    return [Clip(heard, first.start, first.seconds)]
