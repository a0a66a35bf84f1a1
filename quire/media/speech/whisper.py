"""Whisper: control tokens that say what to do, languages that it detects, timestamps of 20 ms.

A model that knows English only (`tiny.en`) has no tokens for languages and tasks in its prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.media.settings import ProcessorFiles, Settings, read_json
from quire.media.speech.languages import LANGUAGES
from quire.media.speech.model import (
    TRANSLATE,
    Decoding,
    Detection,
    SpeechModel,
    SpeechTask,
    SpeechTokenizer,
    TimeSpan,
    heard,
    named,
)
from quire.schema.errors import CheckpointError, InputError
from quire.schema.params import TimeRules
from quire.schema.prompt import Prompt

_MULTILINGUAL = 51865  # tokens; a vocabulary that has fewer is of English alone
_TIME = re.compile(r"<\|\d{1,2}\.\d\d\|>")
_MOST_SUPPRESSED = 4096


class WhisperSpeech(SpeechModel):
    has_timestamps = True
    joint = ""  # words begin with their space

    def __init__(
        self, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: SpeechTokenizer,
        extractor: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`extractor`: settings of its feature extractor."""
        self._tokenizer = tokenizer
        self.config = heard(extractor or {})
        self._tick = (self.config.max_audio_clip_s or 30) / int(config.get("max_source_positions") or 1500)  # seconds
        hop = Settings.of({"hop_length": 160}, extractor or {}).whole("hop_length", high=1 << 16)
        self._frames = self.config.sample_rate / hop  # per second
        self._start = self._token("<|startoftranscript|>")
        self._plain = self._token("<|notimestamps|>")  # timestamps are behind it
        self._end = self._token("<|endoftext|>")
        self._length = int(config.get("max_target_positions") or 448)
        vocabulary = int(config.get("vocab_size") or 0)
        self._num_ticks = vocabulary - self._plain - 1
        self._is_multilingual = bool(generation.get("is_multilingual", vocabulary >= _MULTILINGUAL))
        self._language_ids: dict[str, int] = {}
        if self._is_multilingual:
            ids = {code: tokenizer.token_to_id(f"<|{code}|>") for code in LANGUAGES}
            self._language_ids = {code: one for code, one in ids.items() if one is not None and one < vocabulary}
            if not self._language_ids:
                raise CheckpointError("the tokenizer of this Whisper model has no tokens of languages")
        self.languages = named(self._language_ids or ("en",))
        self.translates = self._is_multilingual
        self.default_language = None if self._is_multilingual else "en"
        self._suppressed = _ids("suppress_tokens", generation, vocabulary)
        self._never_first = _ids("begin_suppress_tokens", generation, vocabulary)
        latest = generation.get("max_initial_timestamp_index")
        self._latest_start = latest if isinstance(latest, int) and 0 <= latest < self._num_ticks else None

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: str, tokenizer: SpeechTokenizer) -> WhisperSpeech:
        extractor = ProcessorFiles.read(folder, config).parts["audio"]
        return cls(config, read_json(folder, "generation_config.json"), tokenizer, extractor)

    def _token(self, name: str) -> int:
        token_id = self._tokenizer.token_to_id(name)
        if token_id is None:
            raise CheckpointError(f"the tokenizer of this Whisper model has no token {name}")
        return token_id

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def prompt(self, task: SpeechTask) -> Prompt:
        return Prompt(token_ids=tuple(self._prompt_ids(task)))

    def _prompt_ids(self, task: SpeechTask) -> Iterator[int]:
        yield from self._guide(task.prompt)
        yield self._start
        if self._is_multilingual:
            if task.language is None:
                raise InputError("language must be given", param="language")
            yield self._language_ids[task.language]
            yield self._token(f"<|{task.kind}|>")
        if not task.with_timestamps:
            yield self._plain

    def _guide(self, text: str) -> list[int]:
        """What was said before, or words to expect: as much of its end as leaves half of the model's length. Nothing in
        it is taken for a control token."""
        if not text.strip():
            return []
        ids = [one for one in self._tokenizer.encode(" " + text.strip(), add_special_tokens=False) if one < self._end]
        return [self._token("<|startofprev|>"), *ids[-(self._length // 2 - 1) :]]

    def detection(self) -> Detection | None:
        if not self._is_multilingual:
            return None
        languages = {one: code for code, one in self._language_ids.items()}
        return Detection(Prompt(token_ids=(self._start,)), languages)

    def decoding(self, task: SpeechTask) -> Decoding:
        """As transformers' generate does: what the checkpoint never lets it say, what no text begins with, and where
        times stand."""
        times = None
        if task.with_timestamps:
            times = TimeRules(
                first_id=self._plain + 1, end_id=self._end, plain_id=self._plain, latest=self._latest_start
            )
        return Decoding(self._suppressed, self._never_first, times)

    def check(self, task: SpeechTask) -> None:
        super().check(task)
        if task.kind == TRANSLATE and task.to_language not in (None, "en"):
            raise InputError(
                f"to_language is {task.to_language!r:.40}; Whisper translates to en", param="to_language",
                value=task.to_language,
            )  # fmt: skip

    # ---- answers ---------------------------------------------------------------------------------------------------

    def spans(self, token_ids: Sequence[int], seconds: float) -> list[TimeSpan]:
        """A timestamp ends what is open, or begins what follows. What has no end lasts as long as the clip."""
        spans: list[TimeSpan] = []
        start, begin, has_text = 0.0, 0, False
        for place, one in enumerate(token_ids):
            if (time := self._time(one)) is None:
                has_text = has_text or one < self._end
                continue
            time = min(time, seconds)
            if has_text:
                spans.append(TimeSpan(start, max(start, time), begin, place + 1))
                begin, has_text = place + 1, False
            else:
                begin = place
            start = max(start, time)
        if has_text:
            spans.append(TimeSpan(start, max(start, seconds), begin, len(token_ids)))
        return spans

    def _time(self, token_id: int) -> float | None:
        tick = token_id - self._plain - 1
        return round(tick * self._tick, 3) if 0 <= tick < self._num_ticks else None

    def audio_tokens(self, seconds: float) -> int:
        """As many as its spectrogram has frames."""
        return math.ceil(round(seconds * self._frames, 6))

    def clean(self, text: str) -> str:
        """Without times, which are no special tokens."""
        return _TIME.sub("", text) if "<|" in text else text

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([one for one in token_ids if one < self._end])


def _ids(name: str, generation: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    values = generation.get(name)
    if not isinstance(values, list):
        return ()
    if len(values) > _MOST_SUPPRESSED:
        raise CheckpointError(f"{name} has {len(values)} tokens; the limit is {_MOST_SUPPRESSED}")
    return tuple(one for one in values if isinstance(one, int) and 0 <= one < vocabulary)
