"""What a prompt or a damaged file says of Phi-4's images and audio is refused before memory is spent on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.media import inputs
from quire.media.audio import Audio
from quire.media.families.phi import Phi4Multimodal
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError


def family(**audio: Any) -> Phi4Multimodal:
    return Phi4Multimodal(ProcessorFiles({}, {"audio_processor": audio} if audio else {}, {}))


@pytest.mark.parametrize(("side", "why"), [(60_000, "the limit is"), (10, "less than a patch")])
def test_sizes_of_images(side: int, why: str) -> None:
    asked = {"size": {"height": side, "width": side}}
    with pytest.raises(InputError, match=why):
        family().process("image", Image.new("RGB", (600, 500)), asked, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"win_length": 1}, {"win_length": 600}, {"mel_min_frequency": -1e9}, {"mel_min_frequency": "abc"},
        {"mel_min_frequency": 9000}, {"n_fft": 1}, {"preemphasis": float("nan")},
    ],
)  # fmt: skip
def test_filter_banks(wrong: dict[str, Any]) -> None:
    audio = Audio(np.zeros(16000, np.float32), 16000)
    with pytest.raises(InputError):
        family(**wrong).process("audio", audio, {}, 1)
    for name in wrong:
        assert name in inputs._OF_THE_MODEL  # a prompt may not choose it
