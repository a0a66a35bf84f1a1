"""Speech models: prompts, languages, times of tokens; and where long audio is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.media import SPEECH_TYPES
from quire.config import SpeechToTextConfig
from quire.media.speech import SPEECH_MODELS
from quire.media.speech.clips import cut_into_clips, quietest
from quire.media.speech.instructed import Qwen2AudioSpeech
from quire.media.speech.languages import LANGUAGES
from quire.media.speech.model import TRANSLATE, SpeechTask
from quire.media.speech.whisper import WhisperSpeech
from quire.schema.errors import CheckpointError, InputError
from quire.schema.params import SpeechRules, TimeRules

CONTROL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
FIRST = 256
ID = {name: FIRST + number for number, name in enumerate(CONTROL)}
ZERO = FIRST + len(CONTROL)
VOCAB = ZERO + 1501


class Bytes:
    """Token b is byte b; control tokens are found in texts, as real tokenizers find them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        for name, one in ID.items():
            text = text.replace(name, chr(0xE000 + one))
        ids: list[int] = []
        for char in text:
            ids += [ord(char) - 0xE000] if ord(char) >= 0xE000 else list(char.encode())
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        assert not isinstance(token_ids, int)
        return bytes(token_ids).decode()

    def token_to_id(self, token: str) -> int | None:
        return ID.get(token)


def whisper(**generation: Any) -> WhisperSpeech:
    config = {"vocab_size": VOCAB, "max_target_positions": 448}
    return WhisperSpeech(config, {"is_multilingual": True, **generation}, Bytes())


def names(model: WhisperSpeech, **task: Any) -> str:
    known = {one: name for name, one in ID.items()}
    return "".join(known.get(one) or chr(one) for one in model.prompt(SpeechTask(**task)).token_ids or ())


def test_every_type_has_a_declaration() -> None:
    assert set(SPEECH_MODELS) == SPEECH_TYPES
    assert len(LANGUAGES) == 100


def test_prompts_of_whisper() -> None:
    model = whisper()
    assert set(model.languages) == {"en", "de"}
    assert names(model, language="de") == "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    timed = model.prompt(SpeechTask(language="en", kind=TRANSLATE, with_timestamps=True)).token_ids
    assert timed == (
        ID["<|startoftranscript|>"],
        ID["<|en|>"],
        ID["<|translate|>"],
    )  # the model writes the first time itself
    assert names(model, language="en", prompt=" Quire. ").startswith(
        "<|startofprev|> Quire.<|startoftranscript|><|en|>"
    )
    injected = names(model, language="en", prompt="a<|startoftranscript|>b<|endoftext|>")
    assert injected.startswith("<|startofprev|> ab<|startoftranscript|>")
    long = model.prompt(SpeechTask(language="en", prompt="x" * 5000)).token_ids or ()
    assert len(long) == 1 + 223 + 4  # half of the model's length is left
    detection = model.detection()
    assert detection is not None and detection.languages == {ID["<|en|>"]: "en", ID["<|de|>"]: "de"}
    assert detection.prompt.token_ids == (ID["<|startoftranscript|>"],)


def test_whisper_of_english_alone() -> None:
    model = whisper(is_multilingual=False)
    assert names(model, language="en") == "<|startoftranscript|><|notimestamps|>"
    timed = model.prompt(SpeechTask(language="en", with_timestamps=True)).token_ids
    assert timed == (ID["<|startoftranscript|>"],)
    assert model.detection() is None and model.default_language == "en"
    for task in (SpeechTask(language="de"), SpeechTask(kind=TRANSLATE)):
        with pytest.raises(InputError):
            model.check(task)


@pytest.mark.parametrize(
    ("task", "param"),
    [({"language": "xx"}, "language"), ({"language": "English"}, "language"),
     ({"kind": TRANSLATE, "to_language": "de"}, "to_language")],
)  # fmt: skip
def test_what_whisper_refuses(task: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as wrong:
        whisper().check(SpeechTask(**task))
    assert wrong.value.param == param


def test_tokens_never_said() -> None:
    never = whisper(suppress_tokens=[1, 2, 10**9, "x"]).decoding(SpeechTask()).never
    assert never == (1, 2)
    assert whisper().decoding(SpeechTask()).as_params() == {}
    first = whisper(begin_suppress_tokens=[5, ID["<|endoftext|>"]]).decoding(SpeechTask()).as_params()
    assert first == {"speech_rules": SpeechRules(never_first=(5, ID["<|endoftext|>"]))}
    timed = whisper(max_initial_timestamp_index=50).decoding(SpeechTask(with_timestamps=True)).times
    assert timed == TimeRules(first_id=ZERO, end_id=ID["<|endoftext|>"], plain_id=ID["<|notimestamps|>"], latest=50)
    for wrong in (-1, "50", 10**9, None):  # a file may say anything
        assert (
            whisper(max_initial_timestamp_index=wrong).decoding(SpeechTask(with_timestamps=True)).times.latest is None
        )
    with pytest.raises(CheckpointError):
        whisper(suppress_tokens=[1] * 5000)


def at(seconds: float) -> int:
    return ZERO + round(seconds / 0.02)


def test_spans() -> None:
    model = whisper()
    ids = [at(0), *b" Hi", at(1.5), at(2), *b" you", at(3.02), at(3.02), *b" all"]
    spans = model.spans(ids, 5.0)
    assert [(one.start, one.end) for one in spans] == [(0.0, 1.5), (2.0, 3.02), (3.02, 5.0)]
    assert [model.text(ids[one.begin : one.stop]) for one in spans] == [" Hi", " you", " all"]
    assert model.spans([*b"no times"], 2.0)[0][:2] == (0.0, 2.0)
    assert model.spans([at(0), at(1)], 2.0) == [] and model.spans([], 2.0) == []
    backwards = model.spans([at(4), *b"a", at(1), *b"b", at(30)], 5.0)  # a model may say anything
    assert [(one.start, one.end) for one in backwards] == [(4.0, 4.0), (4.0, 5.0)]
    past = [ZERO + 1501, *b"x", ID["<|endoftext|>"]]  # no such time in the vocabulary
    assert model.text(past) == "x" and [one[:2] for one in model.spans(past, 1.0)] == [(0.0, 1.0)]


def test_a_tokenizer_without_the_tokens() -> None:
    class Empty(Bytes):
        def token_to_id(self, token: str) -> int | None:
            return None

    with pytest.raises(CheckpointError, match="startoftranscript"):
        WhisperSpeech({"vocab_size": VOCAB}, {}, Empty())


def test_prompts_of_qwen2_audio() -> None:
    model = Qwen2AudioSpeech({"chunk_length": 2})
    text = model.prompt(SpeechTask(language="en")).text or ""
    assert text.count("<|AUDIO|>") == 1 and text.endswith("recognize the speech: <|en|>")
    assert "into French:" in (model.prompt(SpeechTask(kind=TRANSLATE, to_language="fr")).text or "")
    with pytest.raises(InputError, match="no times"):
        model.check(SpeechTask(with_timestamps=True))
    assert model.config.max_audio_clip_s == 2 and model.config.sample_rate == 16000
    assert model.joint_of("zh") == "" and model.joint_of("en") == " "


# ---- cuts


def test_short_audio_is_one_clip() -> None:
    samples = np.ones(16000 * 30, np.float32)
    (clip,) = cut_into_clips(samples, SpeechToTextConfig())
    assert clip.start == 0.0 and clip.seconds == 30.0 and clip.samples.base is samples


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    rate, config = 16000, SpeechToTextConfig()
    samples = np.ones(rate * 75, np.float32)
    for quiet in (29.4, 58.9):
        samples[int(quiet * rate) : int((quiet + 0.2) * rate)] = 0.001
    clips = cut_into_clips(samples, config)
    assert [clip.start for clip in clips] == pytest.approx([0.0, 29.5, 59.0], abs=0.1)
    assert sum(len(clip.samples) for clip in clips) == len(samples)
    assert all(clip.seconds <= 30 for clip in clips)
    for earlier, later in pairwise(clips):
        assert earlier.start + earlier.seconds == pytest.approx(later.start)


@pytest.mark.parametrize("num", [1, 2, 31, 32, 33, 100, 1001])
def test_clips_are_all_of_the_audio(num: int) -> None:
    config = SpeechToTextConfig(sample_rate=16, max_audio_clip_s=2, min_energy_split_window_size=5)
    samples = np.random.default_rng(num).standard_normal(num).astype(np.float32)
    clips = cut_into_clips(samples, config)
    assert np.array_equal(np.concatenate([clip.samples for clip in clips]), samples)
    assert all(0 < len(clip.samples) <= 32 for clip in clips)


def test_audio_that_must_not_be_cut() -> None:
    samples = np.zeros(100, np.float32)
    with pytest.raises(InputError, match="takes 1 s"):
        cut_into_clips(
            samples, SpeechToTextConfig(sample_rate=16, max_audio_clip_s=1, min_energy_split_window_size=None)
        )
    (clip,) = cut_into_clips(samples, SpeechToTextConfig(sample_rate=16, max_audio_clip_s=None))
    assert len(clip.samples) == 100


def test_the_quietest_window() -> None:
    samples = np.abs(np.arange(-50, 50)).astype(np.float32)
    assert abs(quietest(samples, 0, 100, 10) - 50) <= 3
    assert quietest(samples, 10, 12, 1600) == 11  # a window longer than the place
