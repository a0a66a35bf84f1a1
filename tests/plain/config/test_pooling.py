"""config/pooling.py: what the files of a model say about how it is pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.config.pooling import embedding_width, tasks_of, term_pooling
from quire.schema.errors import NotBuiltError, QuireError

CONFIG = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 120, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_masked_language_model_needs_to_say_how_it_is_pooled(tmp_path: Path) -> None:
    """Its embeddings may come from its head (SPLADE) or from its hidden states."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = {"model": str(tmp_path), "skip_tokenizer_init": True}
    with pytest.raises(NotBuiltError, match=r"BertForMaskedLM.*SPLADE"):
        EngineArgs(**args).create_engine_config()
    by_option = EngineArgs(**args, pooler_config={"seq_pooling_type": "MEAN"}).create_engine_config()
    assert by_option.model_config.pooler_config.seq_pooling_type == "MEAN"
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert EngineArgs(**args).create_engine_config().model_config.pooler_config.seq_pooling_type == "MEAN"


def write_splade(folder: Path, config: dict[str, Any], **pooling: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    modules = [{"path": "1", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1").mkdir()
    (folder / "1" / "config.json").write_text(json.dumps(pooling))
    return {"model": str(folder), "skip_tokenizer_init": True}


def test_sparse_embeddings_by_files_or_by_name(tmp_path: Path) -> None:
    """Weights of terms are not normalised, and a text has no other result."""
    args = write_splade(tmp_path, CONFIG, pooling_strategy="sum")
    model = EngineArgs(**args).create_engine_config().model_config
    assert term_pooling(model) == "sum" and tasks_of(model) == ("embed",) and embedding_width(model) == 120
    assert model.pooler_config.use_activation is False
    (tmp_path / "modules.json").unlink()
    named = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    model = EngineArgs(**args, hf_overrides=named).create_engine_config().model_config
    assert term_pooling(model) == "max" and model.pooler_config.use_activation is False


@pytest.mark.parametrize(
    "config, pooling, options, words",
    [
        ({}, {"pooling_strategy": "mean"}, {}, "pooling_strategy = 'mean'; max and sum"),
        ({}, {"activation_function": "log1p_relu"}, {}, "activation_function = 'log1p_relu'"),
        ({"architectures": ["ModernBertForMaskedLM"]}, {}, {}, "ModernBertForMaskedLM: the heads of Bert"),
        ({"tie_word_embeddings": False}, {}, {}, "share the token table"),
        ({}, {}, {"pooler_config": {"pooling_type": "MEAN"}}, "do not apply"),
        ({}, {}, {"pooler_config": {"enable_chunked_processing": True}}, "do not apply"),
    ],
)
def test_sparse_embeddings_that_are_refused(
    config: dict[str, Any], pooling: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    args = write_splade(tmp_path, CONFIG | config, **pooling)
    with pytest.raises(QuireError, match=words):
        EngineArgs(**args, **options).create_engine_config()


def test_other_encoders_need_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    assert config.model_config.pooler_config.seq_pooling_type == "CLS"
