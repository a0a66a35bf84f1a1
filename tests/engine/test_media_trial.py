"""A checkpoint whose files let no image be processed does not start, and says which key is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.schema.errors import CheckpointError, MissingExtraError
from tests.media.tiny_llava import TinyLlava

SMALL: dict[str, Any] = dict(device="cpu", max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = TinyLlava(tmp_path_factory.mktemp("llava")).folder
    path = made / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "crop_size": {"height": 28, "width": "28"}}))
    return made


def test_a_start_names_what_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.worker.Worker.load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(CheckpointError, match=r"crop_size.width of the media processor must be .* got '28'"):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize("options", [
    {"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}},
    {"mm_processor_kwargs": {"crop_size": {"height": 28, "width": 28}}},
])  # fmt: skip
def test_a_start_without_what_is_wrong(folder: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(folder), **SMALL, **options)
    assert llm.generate("the", use_tqdm=False)[0].outputs[0].token_ids


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its encoders are theirs."""
    made = TinyLlava(tmp_path).folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'transformers': run  pip install \"quire-llm\[tra"):
        LLM(str(made), **SMALL)
    assert LLM(str(made), **SMALL, language_model_only=True).generate("the", use_tqdm=False)[0].outputs[0].token_ids
