"""Without the packages that media need, the command that installs them is named."""

from __future__ import annotations

import io
import re
import sys
import wave
from collections.abc import Callable
from typing import Any

import pytest

from quire.media.audio import decode_audio
from quire.media.fallback import make_foreign_family
from quire.media.images import decode_image
from quire.media.settings import ProcessorFiles
from quire.media.video import decode_video
from quire.schema.errors import MissingExtraError

FOUND = ProcessorFiles(processor={"processor_class": "UnheardOfProcessor"})


@pytest.mark.parametrize(
    ("without", "use", "extra"),
    [
        (("PIL", "PIL.Image"), lambda: decode_image(b"an image"), "media"),
        (("av",), lambda: decode_video(b"a video"), "media"),
        (("av", "soundfile"), lambda: decode_audio(b"fLaC"), "media"),
        (("transformers",), lambda: make_foreign_family(None, FOUND), "transformers"),  # type: ignore[arg-type]
    ],
    ids=["image", "video", "audio", "processor"],
)
def test_what_to_install_is_told(
    without: tuple[str, ...], use: Callable[[], Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=re.escape(f'pip install "quire-llm[{extra}]"')):
        use()


def test_wav_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("av", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(200))
    assert len(decode_audio(out.getvalue()).samples) == 100
