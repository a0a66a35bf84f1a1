"""config/pooling.py: what the files of a model say about how it is pooled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config import EngineArgs
from quire.schema.errors import NotBuiltError

CONFIG = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 120, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_masked_language_model_needs_to_say_how_it_is_pooled(tmp_path: Path) -> None:
    """Its embeddings may come from its head (SPLADE), which is not run here."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = {"model": str(tmp_path), "skip_tokenizer_init": True}
    splade = [{"path": "1", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]
    for modules in (None, splade):
        if modules is not None:
            (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(NotBuiltError, match=r"BertForMaskedLM.*SPLADE"):
            EngineArgs(**args).create_engine_config()
    by_option = EngineArgs(**args, pooler_config={"seq_pooling_type": "MEAN"}).create_engine_config()
    assert by_option.model_config.pooler_config.seq_pooling_type == "MEAN"
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert EngineArgs(**args).create_engine_config().model_config.pooler_config.seq_pooling_type == "MEAN"


def test_other_encoders_need_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    assert config.model_config.pooler_config.seq_pooling_type == "CLS"
