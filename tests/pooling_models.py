"""Tiny random checkpoints of pooling models, written by transformers, with a word-level tokenizer that has pairs.

make_pooling(name, folder, **config) fills `folder` and returns the transformers model (eval, float32) that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 120
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, pad_token_id=1,
    max_position_embeddings=64,
)  # fmt: skip
CAUSAL: dict[str, Any] = dict(SMALL, num_key_value_heads=2, head_dim=8, bos_token_id=2, eos_token_id=3)
_DISTIL = dict(dim=32, hidden_dim=48, n_layers=3, n_heads=4)
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SMALL, "Electra": dict(SMALL, embedding_size=16), "Ernie": dict(SMALL, use_task_id=False),
    "Roberta": dict(SMALL, pad_token_id=3), "XLMRoberta": SMALL, "Camembert": SMALL, "MPNet": SMALL,
    "DistilBert": dict(_DISTIL, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=1),
    "ModernBert": dict(SMALL, local_attention=6, norm_bias=True, num_hidden_layers=4, attention_bias=True,
                       classifier_bias=True),
    "NomicBert": SMALL, "Gte": SMALL, "JinaEmbeddingsV3": SMALL,
    "EuroBert": dict(SMALL, num_key_value_heads=2, classifier_pooling="mean"),
    "Llama": CAUSAL, "Mistral": dict(CAUSAL, sliding_window=5), "Qwen2": CAUSAL, "Qwen3": CAUSAL, "Gemma": CAUSAL,
    "Gemma2": dict(CAUSAL, sliding_window=5, query_pre_attn_scalar=8),
}  # fmt: skip
ENCODERS = [name for name in FAMILIES if name not in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2")]
DECODERS = [name for name in FAMILIES if name not in ENCODERS]
WORDS = ("cat", "mat", "dog", "log", "river", "stone", "bridge", "boat", "yes", "no", "what", "is", "the", "a", ".")


def make_pooling(name: str, folder: Path, **config: Any) -> Any:
    """`name` is that of a transformers class."""
    transformers.logging.set_verbosity_error()
    stem = next(stem for stem in sorted(FAMILIES, key=len, reverse=True) if name.startswith(stem))
    cls = getattr(transformers, name)
    made = cls.config_class(**{**FAMILIES[stem], **config})
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(made).eval().float()
    redraw(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def redraw(model: Any) -> None:
    """Every number anew, so that no norm is the identity and no bias is absent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)


def write_tokenizer(folder: Path) -> None:
    tokens = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *WORDS]
    tokens += [f"w{i}" for i in range(VOCAB - len(tokens))]
    pipeline = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    pipeline.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_sentence_files(
    folder: Path, mode: str = "mean_tokens", *, normalize: bool = True, max_length: int = 0, dense: int = 0
) -> None:
    """What sentence-transformers writes beside a model."""
    kind = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Dense", "Dense")] * bool(dense) + [("3_Normalize", "Normalize")] * normalize
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind + name} for i, (path, name) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    if max_length:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def write_splade_files(folder: Path, strategy: str) -> None:
    """What sentence-transformers writes beside a masked language model whose head weighs terms."""
    kind = "sentence_transformers.sparse_encoder.models."
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind + name} for i, (path, name) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_SpladePooling").mkdir()
    about = {"pooling_strategy": strategy, "activation_function": "relu", "word_embedding_dimension": VOCAB}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(about))
