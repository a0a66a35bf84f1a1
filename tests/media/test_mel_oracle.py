"""Whisper's features beside transformers' extractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Gemma3nAudioFeatureExtractor, WhisperFeatureExtractor

from quire.media.audio import Audio
from quire.media.families import make_family
from quire.media.families.speech import WhisperFeatures
from quire.media.mel import MelOptions, mel_filters
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError


@pytest.mark.parametrize(("bins", "seconds"), [(80, 3.1), (128, 30.0), (80, 0.02), (128, 31.0)])
def test_features_equal_transformers(bins: int, seconds: float) -> None:
    rng = np.random.default_rng(int(seconds * 100))
    time = np.arange(int(16000 * seconds)) / 16000
    samples = (0.4 * np.sin(2 * np.pi * 300 * time * (1 + time / 9)) + 0.01 * rng.standard_normal(len(time))).astype(
        np.float32
    )
    theirs = WhisperFeatureExtractor(feature_size=bins)
    expected = theirs(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    settings = {"feature_size": bins, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
    features, mask = WhisperFeatures(Settings(settings)).of(Audio(samples, 16000))
    np.testing.assert_allclose(mel_filters(MelOptions(bins=bins)), theirs.mel_filters, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(features, expected["input_features"], atol=3e-4, rtol=0)  # torch, in float32
    exact = theirs._np_extract_fbank_features([np.pad(samples, (0, max(0, 480000 - len(samples))))[:480000]], "cpu")
    np.testing.assert_allclose(features, exact, atol=2e-6, rtol=0)
    np.testing.assert_array_equal(mask, expected["attention_mask"])
    assert features.dtype == np.float32 and mask.dtype == np.int64


@pytest.mark.parametrize("seconds", [0.04, 1.003, 7.77, 31.0])
@pytest.mark.parametrize("settings", [{}, {"feature_size": 64, "frame_length_ms": 25.0, "fft_overdrive": False}])
def test_features_of_gemma_3n_equal_transformers(seconds: float, settings: dict[str, object]) -> None:
    rng = np.random.default_rng(int(seconds * 100))
    samples = (0.3 * rng.standard_normal(int(16000 * seconds))).astype(np.float32)
    samples[len(samples) // 2 :] = 0  # silence: below the floor of the logarithm
    expected = Gemma3nAudioFeatureExtractor(**settings)(samples, return_tensors="np")
    family = make_family("Gemma3nProcessor", ProcessorFiles(parts={"audio": settings}))
    item = family.process("audio", Audio(samples, 16000), {}, 1)
    assert item.num_vectors == 188 and set(item.arrays) == set(expected)
    np.testing.assert_allclose(item.arrays["input_features"], expected["input_features"], atol=2e-6, rtol=0)
    np.testing.assert_array_equal(item.arrays["input_features_mask"], expected["input_features_mask"])


def test_audio_that_is_too_short_for_a_frame() -> None:
    family = make_family("Gemma3nProcessor", ProcessorFiles())
    with pytest.raises(InputError, match="has 500 samples at 16000 Hz; the model needs more than 512"):
        family.process("audio", Audio(np.zeros(500, np.float32), 16000), {}, 1)


@pytest.mark.parametrize(
    "settings", [{"min_frequency": 8000.0}, {"frame_length_ms": 1e9}, {"dither": 0.1}, {"per_bin_mean": [0.0] * 128}]
)
def test_settings_of_gemma_3n_that_are_refused(settings: dict[str, object]) -> None:
    family = make_family("Gemma3nProcessor", ProcessorFiles(parts={"audio": settings}))
    with pytest.raises(InputError, match="feature extractor"):
        family.process("audio", Audio(np.zeros(16000, np.float32), 16000), {}, 1)
