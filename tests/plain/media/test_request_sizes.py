"""Sizes that a prompt asks for, and sizes in files: refused before pixels or features are made, where the number of an
item's vectors does not follow them or where the parts of an item are too large together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.config import MultiModalConfig
from quire.media import audio as audio_module
from quire.media import pixels
from quire.media.audio import Audio, resample
from quire.media.families import gemma, make_family, phi, speech
from quire.media.inputs import MediaInputs
from quire.media.settings import ProcessorFiles, Settings
from quire.media.sources import MediaSources
from quire.media.video import Video
from quire.media.workers import MediaWorkers
from quire.schema.errors import InputError

IMAGE = Image.new("RGB", (40, 30))
LARGE = {"height": 4088, "width": 4088}


@pytest.fixture
def workers() -> Iterator[MediaWorkers]:
    threads = MediaWorkers(1)
    yield threads
    threads.close()


def inputs(name: str, workers: MediaWorkers, parts: dict[str, Any] | None = None, **options: Any) -> MediaInputs:
    family = make_family(name, ProcessorFiles(parts=parts or {}, config={"vision_config": {"patch_size": 14}}))
    return MediaInputs(family, MediaSources(), MultiModalConfig(mm_processor_cache_gb=0, **options), workers=workers)


@pytest.mark.parametrize(("name", "setting", "value"), [
    ("Molmo2Processor", "size", LARGE), ("Molmo2Processor", "overlap_margins", [3, 4]),
    ("Molmo2Processor", "pooling_size", [64, 64]), ("Gemma3Processor", "size", LARGE),
    ("Gemma3nProcessor", "size", LARGE), ("Gemma3nProcessor", "size", 4088), ("PaliGemmaProcessor", "size", LARGE),
    ("InternVLProcessor", "size", LARGE), ("QianfanOCRProcessor", "size", LARGE), ("Ovis2Processor", "size", LARGE),
    ("Florence2Processor", "size", LARGE), ("Florence2Processor", "do_resize", False),
    ("LlavaOnevisionProcessor", "size", LARGE), ("LlavaOnevisionProcessor", "do_resize", False),
    ("LlavaNextProcessor", "size", LARGE), ("LlavaNextProcessor", "do_center_crop", False),
])  # fmt: skip
def test_sizes_that_vectors_do_not_follow_belong_to_the_model(
    name: str, setting: str, value: Any, workers: MediaWorkers
) -> None:
    owner = inputs(name, workers)
    with pytest.raises(InputError, match=rf"{setting} is .*it belongs to the model and must be .* for image items"):
        owner.load({"image": IMAGE}, processor_options={setting: value})
    settings: Settings = vars(owner.family)["image"]
    own = settings.get(setting)
    assert own is not None
    plain = owner.loaded(owner.load({"image": IMAGE})).items["image"][0].item
    for same in (own, tuple(own) if isinstance(own, list) else own, None):
        futures = owner.load({"image": IMAGE}, processor_options={setting: same})
        assert owner.loaded(futures).items["image"][0].item.num_vectors == plain.num_vectors


def test_a_prompt_repeats_the_option_of_the_engine(workers: MediaWorkers) -> None:
    small = {"height": 28, "width": 28}
    owner = inputs("PaliGemmaProcessor", workers, mm_processor_kwargs={"size": small})
    (item,) = owner.loaded(owner.load({"image": IMAGE}, processor_options={"size": dict(small)})).items["image"]
    assert item.item.arrays["pixel_values"].shape == (1, 3, 28, 28)
    with pytest.raises(InputError, match=r"must be .'height': 28"):
        owner.load({"image": IMAGE}, processor_options={"size": {"height": 224, "width": 224}})


@pytest.mark.parametrize("name", [
    "frame_length_ms", "hop_length_ms", "min_frequency", "max_frequency", "mel_floor", "fft_overdrive", "preemphasis",
    "preemphasis_htk_flavor", "feature_size", "sampling_rate", "dither", "input_scale_factor", "per_bin_mean",
])  # fmt: skip
def test_the_geometry_of_gemma_3n_audio_belongs_to_the_model(name: str, workers: MediaWorkers) -> None:
    owner = inputs("Gemma3nProcessor", workers)
    with pytest.raises(InputError, match=f"{name} belongs to the model"):
        owner.load({"audio": (np.zeros(16000, np.float32), 16000)}, processor_options={name: 1})


@pytest.mark.parametrize(("settings", "message"), [
    ({"hop_length_ms": 1 / 16}, "480001 frames with transforms of 1024 numbers and 128 bins: .* is 67108864"),
    ({"frame_length_ms": 4096.0, "feature_size": 1024}, "3001 frames with transforms of 131072 numbers and 1024 bins"),
    ({"frame_length_ms": 4096.0, "hop_length_ms": 4000.0, "feature_size": 1024},
     "8 frames with transforms of 131072 numbers and 1024 bins"),
    ({"max_frequency": float("inf")}, "max_frequency of the media processor must be a positive number, got inf"),
])  # fmt: skip
def test_transforms_of_gemma_3n_are_bounded(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma, "log_magnitudes", lambda *_: pytest.fail("features were made"))
    family = make_family("Gemma3nProcessor", ProcessorFiles(parts={"audio": settings}))
    with pytest.raises(InputError, match=message):
        family.process("audio", Audio(np.zeros(160_000, np.float32), 16000), {}, 1)


def test_crops_of_molmo_2_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "sampled_bytes", lambda *_: pytest.fail("a crop was made"))
    part = {"size": LARGE, "max_crops": 64, "overlap_margins": [145, 146]}
    family = make_family("Molmo2Processor", ProcessorFiles(parts={"image": part}))
    total = 65 * 4088 * 4088
    with pytest.raises(
        InputError, match=f"65 crops of 4088x4088 pixels have {total} pixels together; the limit is 671"
    ):
        family.process("image", Image.new("RGB", (4186, 4186)), {}, 1)


def test_crops_of_gemma_3_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("a crop was made"))
    settings = {"size": LARGE, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    family = make_family("Gemma3Processor", ProcessorFiles(parts={"image": settings}))
    with pytest.raises(InputError, match="5 crops of 4088x4088 pixels have 83558720 pixels together; the limit is 671"):
        family.process("image", Image.new("RGB", (400, 90)), {}, 1)


def test_tiles_of_llava_next_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", "100000")
    settings = {"size": {"shortest_edge": 150}, "crop_size": {"height": 150, "width": 150},
                "image_grid_pinpoints": [[300, 300]]}  # fmt: skip
    files = ProcessorFiles(parts={"image": settings}, config={"vision_config": {"patch_size": 14}})
    with pytest.raises(InputError, match="5 crops of 150x150 pixels have 112500 pixels together; the limit is 100000"):
        make_family("LlavaNextProcessor", files).process("image", Image.new("RGB", (40, 40)), {}, 1)


def test_frames_of_different_sizes_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_IMAGE_PIXELS", "100000")
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("a frame was resized"))
    family = make_family("LlavaOnevisionProcessor", ProcessorFiles(parts={"video": {"size": {"shortest_edge": 32}}}))
    square, long = Image.new("RGB", (8, 8)), Image.new("RGB", (640, 8))

    def process(frames: list[Image.Image]) -> None:
        family.process("video", Video(frames, list(range(len(frames))), 1.0, len(frames)), {}, 1)

    total = 2 * 32 * 32 + 2 * 2560 * 32
    with pytest.raises(InputError, match=f"4 frames of up to 2560x32 pixels have {total} pixels together"):
        process([square, square, long, long])
    with pytest.raises(InputError, match="different sizes once they are resized: 32x32 and 2560x32 pixels"):
        process([square, long])


@pytest.mark.parametrize("rate", [8000, 11025, 15999, 16000, 44100, 48000, 96000])
def test_the_beginning_of_resampled_audio_is_all_that_is_made(rate: int) -> None:
    audio = Audio(np.random.default_rng(rate).standard_normal(rate * 2).astype(np.float32), rate)
    whole = resample(audio, 16000)
    for most in (1, 1000, 7777, 31_999, 32_000, 40_000):
        assert np.array_equal(resample(audio, 16000, most), whole[:most])


def test_what_follows_the_beginning_is_not_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered, lengths = audio_module._filtered, []

    def counted(audio: Audio, *settings: Any) -> Any:
        lengths.append(len(audio.samples))
        return filtered(audio, *settings)

    monkeypatch.setattr(audio_module, "_filtered", counted)
    assert len(resample(Audio(np.zeros(480_000, np.float32), 48000), 16000, 1000)) == 1000
    assert len(lengths) == 1 and 3000 < lengths[0] < 3200


@pytest.mark.parametrize("name", ["Gemma3nProcessor", "Qwen2AudioProcessor"])
def test_audio_behind_what_is_heard_is_not_resampled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(audio: Audio, rate: int, most: int | None = None) -> Any:
        made.append(most)
        return resample(audio, rate, most)

    for module in (gemma, speech):
        monkeypatch.setattr(module, "resample", counted)
    noise = np.random.default_rng(1).standard_normal(35 * 8000).astype(np.float32)
    family = make_family(name, ProcessorFiles())
    long = family.process("audio", Audio(noise, 8000), {}, 1).arrays
    assert made == [480_000]
    whole = family.process("audio", Audio(resample(Audio(noise, 8000), 16000)[:480_000], 16000), {}, 1).arrays
    assert all(np.array_equal(long[key], whole[key]) for key in whole)


@pytest.mark.parametrize(("settings", "message"), [
    ({"chunk_length": 3600, "sampling_rate": 768_000, "hop_length": 65_536}, "2764800000 samples at once"),
    ({"hop_length": 1, "n_fft": 400}, "480000 frames with transforms of 400 numbers and 128 bins"),
])  # fmt: skip
def test_features_of_whisper_are_bounded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"{message}.* is 67108864"):
        make_family("Qwen2AudioProcessor", ProcessorFiles(parts={"audio": settings}))


def test_filter_banks_of_phi_4_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phi, "log_banks", lambda *_: pytest.fail("features were made"))
    family = make_family("Phi4MultimodalProcessor", ProcessorFiles(parts={"audio": {"hop_length": 1}}))
    with pytest.raises(
        InputError, match=r"2100000 frames with transforms of 512 numbers and 80 bins: .* is 1073741824"
    ):
        family.process("audio", Audio(np.zeros(2_100_000, np.float32), 16000), {}, 1)
