"""Families without data here: transformers' own processor, called item by item.

The only module of this package that imports transformers, and only for such a family. Options of requests are refused,
because what these processors do with them is unknown. Must not know: how any processor works.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.registry import load
from quire.media.audio import Audio, resample
from quire.media.families.base import Family, ProcessedItem
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError, MissingExtraError, NotBuiltError

if TYPE_CHECKING:
    from quire.config import ModelConfig

_TOKENS = {"image": ("boi_token", "image_token"), "audio": ("audio_token",)}
_KEYWORDS = {"image": "images", "audio": "audio"}
_TEXT_ONLY = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")


class ForeignFamily(Family):
    """`placeholders` come from the processor; of video there is none, because their video processors need
    torchvision."""

    def __init__(self, files: ProcessorFiles, processor: Any) -> None:
        super().__init__(files)
        self.inner = processor
        self._lock = threading.Lock()  # not all of them may be called by several threads at once
        placeholders = {}
        for modality, names in _TOKENS.items():
            tokens = [getattr(processor, name) for name in names if hasattr(processor, name)]
            if tokens and isinstance(tokens[0], str):
                placeholders[modality] = tokens[0]
        self.placeholders = placeholders
        if not placeholders:
            raise _unknown(files, "its processor has no placeholder of one token")

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        import numpy as np  # lazy

        if modality not in self.placeholders:
            raise self.refuse(modality)
        if options:
            raise InputError(
                "mm_processor_kwargs are not supported for this model: it uses transformers' own processor",
                param="mm_processor_kwargs",
            )
        token = self.placeholders[modality]
        if isinstance(value, Audio):
            value = resample(value, int(self.inner.feature_extractor.sampling_rate))
        with self._lock:
            try:
                out = self.inner(text=[token], **{_KEYWORDS[modality]: [value]}, return_tensors="np")
            except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as wrong:
                raise InputError(f"the {modality} cannot be processed: {str(wrong)[:300]}", param=modality) from None
        tokenizer = self.inner.tokenizer
        special = tokenizer("", add_special_tokens=True)["input_ids"]
        ids = [int(one) for one in np.asarray(out["input_ids"])[0]]
        while special and ids[: len(special)] == special:
            ids = ids[len(special) :]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise NotBuiltError(f"what stands for {modality} items of this model cannot be written as text")
        feature = tokenizer.convert_tokens_to_ids(self.feature(modality))
        arrays = {key: np.asarray(array) for key, array in out.items() if key not in _TEXT_ONLY}
        return ProcessedItem(arrays, text, ids.count(feature))


def make_foreign_family(model: ModelConfig, files: ProcessorFiles) -> Family:
    if not files.is_found:
        raise _unknown(files, "the checkpoint has no processor_config.json and no preprocessor_config.json")
    try:
        auto = load("transformers:AutoProcessor")
    except ImportError:
        raise MissingExtraError("media of this model", "transformers", "transformers") from None
    try:
        processor = auto.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except Exception as wrong:  # noqa: BLE001  whatever another library raises
        raise _unknown(
            files, f"transformers' processor cannot be made: {type(wrong).__name__}: {str(wrong)[:300]}"
        ) from None
    return ForeignFamily(files, processor)


def _unknown(files: ProcessorFiles, why: str) -> NotBuiltError:
    kind = files.config.get("model_type")
    return NotBuiltError(f"media of model type {kind!r:.60} are not in this version of Quire: {why}", param="model")
