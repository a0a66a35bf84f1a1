"""Whisper's features beside transformers' extractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from quire.media.audio import Audio
from quire.media.families.speech import WhisperFeatures
from quire.media.mel import MelOptions, mel_filters
from quire.media.settings import Settings


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
