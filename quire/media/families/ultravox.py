"""Ultravox: audio of any length, in pieces of what Whisper's encoder hears at once; several of its vectors make one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.media.audio import Audio, resample
from quire.media.families.base import Family, ProcessedItem
from quire.media.families.speech import EXTRACTOR, WhisperFeatures, num_bins
from quire.media.mel import log_mel
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError

_PROCESSOR = {"audio_context_size": 3000, "encoder_ds_factor": 2, "stack_factor": 8}
_MOST_FRAMES = 1 << 17
# tokens of language models' vocabularies that no text has
_SPARES = ("<|reserved_special_token_0|>", "<unused0>", "<|fim_pad|>", "<|extra_0|>", "<pad>", "<unk>")


class Ultravox(Family):
    placeholders = {"audio": "<|audio|>"}
    embeds_by_count = ("audio",)
    spares = _SPARES

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        audio, text = (files.section(name) for name in ("audio_config", "text_config"))
        bins = num_bins(files.numbers("audio_config"), 80)
        self.audio = self.settings("audio", {**EXTRACTOR, "feature_size": bins})
        self.features_of = WhisperFeatures(self.audio)
        own = self.processor(_PROCESSOR)
        stack = Settings({"stack_factor": files.config.get("stack_factor") or own.get("stack_factor")})
        self.stride = 2 * stack.whole("stack_factor", high=1024)
        if own.whole("encoder_ds_factor", high=1024) != 2:
            raise InputError(f"encoder_ds_factor is {own.get('encoder_ds_factor')}; Whisper's encoder has 2")
        places = Settings({"max_source_positions": audio.get("max_source_positions") or 1500})
        most = 2 * places.whole("max_source_positions", high=_MOST_FRAMES // 2)
        self.num_frames = min(own.whole("audio_context_size", high=_MOST_FRAMES), most)
        size = text.get("vocab_size")
        self.num_tokens = size if isinstance(size, int) and not isinstance(size, bool) else None

    def process(self, modality: str, value: Audio, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality != "audio":
            raise self.refuse(modality)
        mel = (WhisperFeatures(self.audio.over(options)) if options else self.features_of).mel
        samples = resample(value, mel.rate)
        whole = max(2, -(-len(samples) // mel.hop)) * mel.hop  # silence up to whole frames
        features = log_mel(np.pad(samples, (0, whole - len(samples))), mel)
        lens = [min(self.num_frames, features.shape[1] - at) for at in range(0, features.shape[1], self.num_frames)]
        pieces = np.zeros((len(lens), mel.bins, lens[0]), np.float32)
        for index, length in enumerate(lens):
            pieces[index, :, :length] = features[:, index * self.num_frames : index * self.num_frames + length]
        num = sum(-(-length // self.stride) for length in lens)
        arrays = {"input_features": pieces, "piece_lens": np.array(lens, np.int64)}
        return ProcessedItem(arrays, self.placeholders["audio"] * num, num)
