"""A tiny random Whisper of two languages that hears two seconds, written by transformers, whose own `generate` is asked
for what it hears."""

from __future__ import annotations

import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer

from tests.seq2seq_models import draw_audio
from tests.tiny_models import VOCAB, write_tokenizer

RATE, SECONDS, BINS, LENGTH = 16000, 2, 20, 96
CONTROL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
ID = {name: VOCAB + number for number, name in enumerate(CONTROL)}
TIMES = [f"<|{number * 0.02:.2f}|>" for number in range(50 * SECONDS + 1)]
SUPPRESSED = [30, 31, 32]
NEVER_FIRST = list(range(40, VOCAB, 2))
LATEST_START = 20  # of the first time, in ticks


class TinyWhisper:
    def __init__(self, folder: Path, length: int = LENGTH) -> None:
        """`length`: tokens of a prompt and a text."""
        tf.logging.set_verbosity_error()
        self.folder = folder
        end = ID["<|endoftext|>"]
        config = tf.WhisperConfig(
            vocab_size=VOCAB + len(CONTROL) + len(TIMES), d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40,
            num_mel_bins=BINS, max_source_positions=50 * SECONDS, max_target_positions=length, pad_token_id=end,
            bos_token_id=end, eos_token_id=end, decoder_start_token_id=ID["<|startoftranscript|>"],
        )  # fmt: skip
        config._attn_implementation = "eager"
        torch.manual_seed(5)
        self.model: Any = tf.WhisperForConditionalGeneration(config).eval().float()
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                if one.ndim > 1:
                    positions, embeds, cross = "embed_positions" in name, "embed_tokens" in name, "encoder_attn" in name
                    one.normal_(std=1.0 if positions or cross else 0.25 if embeds else 0.4)
        self.model.tie_weights()
        self.model.generation_config = tf.GenerationConfig(
            is_multilingual=True, lang_to_id={"<|en|>": ID["<|en|>"], "<|de|>": ID["<|de|>"]},
            task_to_id={"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
            no_timestamps_token_id=ID["<|notimestamps|>"], decoder_start_token_id=ID["<|startoftranscript|>"],
            suppress_tokens=SUPPRESSED, begin_suppress_tokens=[*NEVER_FIRST, end],
            max_initial_timestamp_index=LATEST_START,
            pad_token_id=end, bos_token_id=end, eos_token_id=end, max_length=length,
        )  # fmt: skip
        self.model.save_pretrained(folder)
        write_tokenizer(folder)
        self._write_files(end)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def _write_files(self, end: int) -> None:
        path = self.folder / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TIMES])
        tokenizer.save(str(path))
        about = json.loads((self.folder / "tokenizer_config.json").read_text())
        (self.folder / "tokenizer_config.json").write_text(json.dumps({**about, "eos_token": CONTROL[0]}))
        extractor = {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS, "sampling_rate": RATE,
            "hop_length": 160, "chunk_length": SECONDS, "n_fft": 400, "padding_value": 0.0,
            "processor_class": "WhisperProcessor",
        }  # fmt: skip
        (self.folder / "preprocessor_config.json").write_text(json.dumps(extractor))

    def _features(self, samples: Any) -> torch.Tensor:
        extractor = tf.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS, sampling_rate=RATE)
        features: torch.Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return features

    def heard(
        self, samples: Any, count: int, *, language: str = "en", task: str = "transcribe", prompt: str = ""
    ) -> str:
        """What transformers' generate hears: at most `count` tokens."""
        ids = self.token_ids(samples, count, language=language, task=task, prompt=prompt)
        assert not set(ids) & set(SUPPRESSED) and ids[0] not in NEVER_FIRST
        ids = [one for one in ids if not VOCAB <= one < VOCAB + len(CONTROL)]
        return re.sub(r"<\|\d+\.\d\d\|>", "", self.tokenizer.decode(ids))

    def token_ids(
        self, samples: Any, count: int, *, language: str = "en", task: str = "transcribe", prompt: str = "",
        with_times: bool = False,
    ) -> list[int]:  # fmt: skip
        """What transformers' generate writes, with all of its own rules."""
        more: dict[str, Any] = {}
        if prompt:
            ids = [ID["<|startofprev|>"], *self.tokenizer.encode(" " + prompt, add_special_tokens=False).ids]
            more["prompt_ids"] = torch.tensor(ids)
        tokens = self.model.generate(
            self._features(samples), language=language, task=task, return_timestamps=with_times, do_sample=False,
            num_beams=1, max_new_tokens=count, force_unique_generate_call=True, **more,
        )  # fmt: skip
        ids: list[int] = tokens[0].tolist()
        last = ID[f"<|{task}|>"] if with_times else ID["<|notimestamps|>"]
        ids = ids[ids.index(last) + 1 :]
        assert len(ids) <= count
        return ids

    def language(self, samples: Any) -> str:
        found = int(self.model.detect_language(self._features(samples))[0])
        return {ID["<|en|>"]: "en", ID["<|de|>"]: "de"}[found]


def wav(samples: Any, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    return out.getvalue()


def read_back(data: bytes) -> Any:
    """The samples as a reader of the file has them."""
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(1 << 30), "<i2").astype(np.float32) / 32768


def speech(seed: int, seconds: float) -> bytes:
    return wav(draw_audio(seed, seconds) * 0.5)
