"""Documented programs with audio and images, written against vLLM's interface and run through compat/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.test_programs import quoted, run
from tests.media.tiny_llava import TinyLlava
from tests.tiny_whisper import TinyWhisper, read_back, speech


def test_encoder_decoder_multimodal(tmp_path: Path) -> None:
    """Both forms of prompt say what transformers hears, without the checkpoint's own rules, as the program asks."""
    tiny = TinyWhisper(tmp_path / "m")
    data = speech(3, 1.3)
    (tmp_path / "a.wav").write_bytes(data)
    printed = run("encoder_decoder_multimodal", "--model", str(tiny.folder), "--audio", str(tmp_path / "a.wav"))
    texts = quoted(printed, "Generated text")
    assert len(texts) == 2 and texts[0] == texts[1]
    tiny.model.generation_config.suppress_tokens = tiny.model.generation_config.begin_suppress_tokens = None
    ids = tiny.token_ids(read_back(data), 8)
    assert texts[0] == tiny.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.filterwarnings("ignore")
def test_multimodal_uuids(tmp_path: Path) -> None:
    TinyLlava(tmp_path)
    printed = run("multimodal_uuids", str(tmp_path))
    assert quoted(printed, "Same") == [True] and quoted(printed, "Unknown") == [True]
