"""Tiny random encoder-decoder models, written by transformers, and greedy answers of theirs.

FAMILIES: architecture -> fields of its configuration. Whisper hears one second, as 100 frames of 20 bins, and its
tokenizer has the tokens of a transcript.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer

from tests.tiny_models import VOCAB, write_tokenizer

RATE, SECONDS, BINS = 16000, 1, 20
WHISPER = "WhisperForConditionalGeneration"
STARTS = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")  # ids from VOCAB on
BEGIN = "".join(STARTS)
_ENDS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_T5: dict[str, Any] = dict(
    d_model=32, d_kv=12, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, n_positions=128,
    decoder_start_token_id=0, **_ENDS,
)  # fmt: skip
_BART: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
    encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=128, scale_embedding=True,
    decoder_start_token_id=2, forced_eos_token_id=None, **_ENDS,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": _T5,
    "T5ForConditionalGeneration gated": dict(_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "MT5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": dict(_BART, forced_bos_token_id=5),
    "MBartForConditionalGeneration": dict(_BART, decoder_start_token_id=7),
    "PegasusForConditionalGeneration": dict(_BART, decoder_start_token_id=0),
    WHISPER: dict(
        d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=40, num_mel_bins=BINS, max_source_positions=50 * SECONDS,
        max_target_positions=64, decoder_start_token_id=VOCAB, vocab_size=VOCAB + len(STARTS), **_ENDS,
    ),
}  # fmt: skip


def make_model(name: str, folder: Path) -> Any:
    """The transformers model (eval, float32, eager attention) whose checkpoint is now in `folder`."""
    tf.logging.set_verbosity_error()
    cls = getattr(tf, name.partition(" ")[0])
    config = cls.config_class(**{"vocab_size": VOCAB, **FAMILIES[name]})
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = cls(config).eval().float()
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_std(name, place))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        if "Pegasus" in name:  # its positions are parameters too, and stay what they are
            for half in (model.model.encoder, model.model.decoder):
                half.embed_positions.weight.copy_(half.embed_positions.create_weight())
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    model.tie_weights()
    forced = FAMILIES[name].get("forced_bos_token_id")
    start = FAMILIES[name]["decoder_start_token_id"]
    model.generation_config = tf.GenerationConfig(decoder_start_token_id=start, forced_bos_token_id=forced, **_ENDS)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if name == WHISPER:
        _make_speech(folder)
    return model


def _std(name: str, place: str) -> float:
    """Positions and what the encoder said outweigh the tied table, so that an answer is not one token for ever."""
    if "T5" in name:
        return 0.25
    if "embed_positions" in place:
        return 1.0
    return 0.1 if "embed" in place or "shared" in place else 1.0 if "encoder_attn" in place else 0.4


def _make_speech(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in STARTS])
    tokenizer.save(path)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS, "sampling_rate": RATE,
        "hop_length": 160, "chunk_length": SECONDS, "n_fft": 400, "padding_value": 0.0,
        "processor_class": "WhisperProcessor", "n_samples": RATE * SECONDS, "nb_max_frames": 100 * SECONDS,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))


def draw_text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB) for _ in range(count)]


def draw_audio(seed: int, seconds: float = 0.7, rate: int = RATE) -> np.ndarray:
    """A few tones and some noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * rng.uniform(100, 3000) * times) for _ in range(3))
    return (0.2 * tones + 0.05 * rng.standard_normal(len(times))).astype(np.float32)


def features_of(audio: np.ndarray) -> torch.Tensor:
    """By transformers' own extractor."""
    extractor = tf.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS, sampling_rate=RATE)
    return extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def greedy(model: Any, given: list[int] | np.ndarray, start: list[int], count: int) -> Answer:
    """The next `count` tokens after `start`, the whole text computed anew for each; ends do not end it."""
    inputs = {"input_ids": torch.tensor([given])} if isinstance(given, list) else {"input_features": features_of(given)}
    tokens, logprobs = list(start), []
    with torch.inference_mode():
        encoded = model.get_encoder()(**inputs)
        for _ in range(count):
            out = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens]), use_cache=False)
            best = out.logits[0, -1].log_softmax(-1).max(-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
    return Answer(tokens[len(start) :], logprobs)
