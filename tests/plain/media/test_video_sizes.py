"""Frames that grow when they are resized: refused before their pixels are made, in every family that takes video."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from quire.media import pixels
from quire.media.families import make_family
from quire.media.settings import ProcessorFiles
from quire.media.video import Video
from quire.schema.errors import InputError

FAMILIES = (
    "InternVLProcessor", "PerceptionLMProcessor", "LlavaOnevisionProcessor", "Qwen2VLProcessor", "Qwen3VLProcessor",
    "Glm4vProcessor", "Molmo2Processor",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_frames_of_a_long_video(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", "1000000")
    made = 0
    planes = pixels.planes

    def counted(image: Image.Image) -> pixels.Array:
        nonlocal made
        made += 1
        return planes(image)

    monkeypatch.setattr(pixels, "planes", counted)
    frame = Image.fromarray(np.zeros((16, 16, 3), np.uint8))
    family = make_family(name, ProcessorFiles())
    with pytest.raises(InputError, match=r"frames of \d+x\d+ pixels have \d+ pixels together; the limit is 1000000"):
        family.process("video", Video([frame] * 2048, list(range(2048)), 24.0, 2048), {}, 1)
    assert made == 0
