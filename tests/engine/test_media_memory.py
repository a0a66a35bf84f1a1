"""The largest items go from the engine to its worker and through the encoder before memory is shared out: on a CPU, as
a start on a GPU does it, with a number in place of the device's counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.engine import start
from quire.engine.largest_media import make_largest
from quire.worker import worker
from tests.media_models import make_model

NAMES = {"LlavaForConditionalGeneration": 16, "UltravoxModel": 375, "Llama4ForConditionalGeneration": None}


@pytest.mark.parametrize("name", NAMES)
def test_largest_items_reach_the_encoder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(name, tmp_path)
    counts: list[int] = []

    def peak(device: torch.device, run: Callable[[], None], what: str = "") -> int:
        assert "skip_mm_profiling" in what
        run()
        counts.append(1)
        return 1 << 30

    monkeypatch.setattr(worker, "peak", peak)
    monkeypatch.setattr(start, "_largest_media", lambda config: make_largest(config.model_config))
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        loop: Any = llm.llm_engine.front.client.loop
        taken = loop.executor.worker._media_bytes
    assert counts == [1] and taken.peak == 1 << 30
    num = taken.cached // (64 * 4)  # vectors of 64 floats
    assert num >= 64 and num <= 512
    if (expected := NAMES[name]) is not None:
        assert num == max(64, expected), num
