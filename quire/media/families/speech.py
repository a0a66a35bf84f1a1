"""Whisper, and models that hear through its encoder: Qwen2-Audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.media.audio import Audio, resample
from quire.media.families.base import Family, ProcessedItem
from quire.media.mel import MOST_NUMBERS, MelOptions, check_transforms, log_mel
from quire.media.pixels import Array
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import CheckpointError, InputError

EXTRACTOR = {
    "feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400,
    "padding_value": 0.0,    "dither": 0.0, "return_attention_mask": True, "padding_side": "right",
}  # fmt: skip
_MOST_BINS = 1024


def num_bins(config: Settings, default: int) -> int:
    """As the encoder has them."""
    return config.whole("num_mel_bins", default, high=_MOST_BINS)


class WhisperFeatures:
    """Samples, filled up with silence to the length of a chunk, as a log-mel spectrogram and a mask of what is
    audio."""

    def __init__(self, settings: Settings) -> None:
        rate, hop = settings.whole("sampling_rate", high=768_000), settings.whole("hop_length", high=1 << 16)
        self.mel = MelOptions(
            bins=settings.whole("feature_size", high=_MOST_BINS),
            rate=rate,
            window=settings.whole("n_fft", high=1 << 16),
            hop=hop,
        )
        self.num_samples = settings.whole("chunk_length", high=3600) * rate
        if self.num_samples > MOST_NUMBERS:
            raise InputError(
                f"the feature extractor hears {self.num_samples} samples at once (chunk_length x sampling_rate); the "
                f"limit is {MOST_NUMBERS}"
            )
        if self.num_samples < hop:
            raise InputError(
                f"the feature extractor hears {self.num_samples} samples at once (chunk_length x sampling_rate), fewer "
                f"than hop_length, which is {hop}"
            )
        check_transforms(self.num_samples // hop, self.mel.window, self.mel.bins)

    def of(self, audio: Audio) -> tuple[Array, Array]:
        """(1, bins, frames) and (1, frames); what is longer than a chunk is cut off."""
        import numpy as np  # lazy

        samples = resample(audio, self.mel.rate, self.num_samples)
        padded = np.zeros(self.num_samples, np.float32)
        padded[: len(samples)] = samples
        features = log_mel(padded, self.mel)
        mask = (np.arange(0, self.num_samples, self.mel.hop) < len(samples)).astype(np.int64)[: features.shape[1]]
        return features[None], mask[None]


class Qwen2Audio(Family):
    placeholders = {"audio": "<|AUDIO|>"}
    embeds_by_count = ("audio",)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        bins = num_bins(files.numbers("audio_config"), 128)
        self.audio = self.settings("audio", {**EXTRACTOR, "feature_size": bins}, "n_samples", "nb_max_frames")
        self.features_of = WhisperFeatures(self.audio)

    def written(self, modality: str, number: int) -> str:
        return f"Audio {number}: <|audio_bos|>{self.placeholders['audio']}<|audio_eos|>"

    def process(self, modality: str, value: Audio, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality != "audio":
            raise self.refuse(modality)
        features, mask = (WhisperFeatures(self.audio.over(options)) if options else self.features_of).of(value)
        frames = int(mask.sum())
        num = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        arrays = {"input_features": features, "feature_attention_mask": mask}
        return ProcessedItem(arrays, self.placeholders["audio"] * num, num)


class Whisper(Family):
    """An item is what the encoder reads, and has no place in the decoder's prompt."""

    placeholders = {"audio": ""}
    most_items = {"audio": 1}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        bins = num_bins(files.numbers(), 80)
        self.audio = self.settings("audio", {**EXTRACTOR, "feature_size": bins}, "n_samples", "nb_max_frames")
        self.features_of = WhisperFeatures(self.audio)
        self._check_config(files.config)

    def _check_config(self, config: Mapping[str, Any]) -> None:
        """The encoder takes features of one shape."""
        features = self.features_of
        frames = features.num_samples // features.mel.hop
        for name, made, read in (
            ("num_mel_bins", features.mel.bins, config.get("num_mel_bins")),
            ("max_source_positions", frames / 2, config.get("max_source_positions")),
        ):
            if isinstance(read, int) and read != made:
                raise CheckpointError(
                    f"the feature extractor (preprocessor_config.json) makes {features.mel.bins} mel bins and {frames} "
                    f"frames, and config.json has {name} {read}: they are of different models"
                )

    def process(self, modality: str, value: Audio, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality != "audio":
            raise self.refuse(modality)
        extractor = WhisperFeatures(self.audio.over(options)) if options else self.features_of
        rate, most = extractor.mel.rate, extractor.num_samples + extractor.mel.hop
        if len(value.samples) * rate > most * value.rate:
            raise InputError(
                f"the audio lasts {len(value.samples) / value.rate:.1f} s, and the model hears "
                f"{extractor.num_samples / rate:g} s at once: send it in pieces",
                param="multi_modal_data",
            )
        features, _ = extractor.of(value)
        return ProcessedItem({"input_features": features[0]}, "", features.shape[2] // 2)
