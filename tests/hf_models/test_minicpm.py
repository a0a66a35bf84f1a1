"""The encoder of MiniCPM-V up to 4.5: vectors beside a plain one in torch, and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.hf_models.equivalents import equivalent_of
from quire.hf_models.minicpm import grid_waves, places
from quire.hf_models.towers import Tower, load_tower
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from tests import minicpm_oracle
from tests.media_models import make_model

CPU = torch.device("cpu")


def tower_of(folder: Path, **over: Any) -> Tower:
    raw = json.loads((folder / "config.json").read_text()) | over
    return load_tower(raw, str(folder), dtype=torch.float32, device=CPU)


def pieces(sizes: list[list[int]]) -> dict[str, torch.Tensor]:
    patch = minicpm_oracle.PATCH
    pixels = torch.randn(1, 3, patch, patch * sum(height * width for height, width in sizes))
    return {"pixel_values": pixels, "target_sizes": torch.tensor(sizes)}


@pytest.mark.parametrize("release", minicpm_oracle.LANGUAGE)
@torch.inference_mode()
def test_vectors(release: str, tmp_path: Path) -> None:
    """Pieces of any sizes, also those with more patches along a side than there are places, and more than are encoded
    at once."""
    model = make_model(f"MiniCPMV {release}", tmp_path)
    tower = tower_of(tmp_path)
    for sizes in ([[4, 6]], [[1, 1], [9, 3], [9, 3], [3, 9]], [[23, 2], [1, 40]], [[2, 3]] * 35):
        arrays = pieces(sizes)
        expected = model.get_image_features(**arrays)
        torch.testing.assert_close(tower.encode("image", arrays), expected, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(tower.encode("video", arrays), expected, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_vectors_of_frames_that_are_seen_at_once(tmp_path: Path) -> None:
    model = make_model("MiniCPMV 4.5", tmp_path)
    tower = tower_of(tmp_path)
    arrays = pieces([[3, 4]] * 5 + [[5, 2]] * 2) | {"temporal_ids": torch.tensor([0, 1, 5, 6, 90, 400, 900])}
    for packs in ([1] * 7, [3, 3, 1], [6, 1]):
        given = arrays | {"packs": torch.tensor(packs)}
        vectors = tower.encode("video", given)
        assert len(vectors) == len(packs) * minicpm_oracle.QUERIES
        torch.testing.assert_close(vectors, model.get_video_features(**given), atol=2e-4, rtol=1e-3)
    plain = tower.encode("video", given | {"temporal_ids": torch.zeros(7, dtype=torch.int64)})
    assert (vectors - plain)[: minicpm_oracle.QUERIES].abs().max() > 1e-2  # times count between frames


@pytest.mark.parametrize("change", [
    {"target_sizes": torch.tensor([[2, 3], [2, 2]])}, {"target_sizes": torch.tensor([[0, 5], [2, 3]])},
    {"target_sizes": torch.tensor([[-2, -3], [2, 3]])}, {"pixel_values": torch.zeros(1, 3, 7, 7)},
    {"packs": torch.tensor([1]), "temporal_ids": torch.tensor([0, 1])},
    {"packs": torch.tensor([3, -1]), "temporal_ids": torch.tensor([0, 1])},
    {"packs": torch.tensor([1, 1]), "temporal_ids": torch.tensor([0])},
])  # fmt: skip
def test_arrays_that_do_not_fit(change: dict[str, Any], tmp_path: Path) -> None:
    make_model("MiniCPMV 4.5", tmp_path)
    with pytest.raises(ValueError, match=r"patches of|frames, "):
        tower_of(tmp_path).encode("video", pieces([[2, 3], [2, 3]]) | change)


@pytest.mark.parametrize("side", [9, 10, 16, 70])
def test_places_of_patches(side: int) -> None:
    """The place that a patch begins in, of which rounding may make a neighbour where a patch begins on a border."""
    for num in range(1, 3 * side):
        rows = places((num, 1), side) // side
        assert rows.shape == (num,) and int(rows.min()) >= 0 and int(rows.max()) < side
        for row, place in enumerate(rows.tolist()):
            on_a_border = row * side % num == 0
            assert place == row * side // num or (on_a_border and place == row * side // num - 1)


def test_waves() -> None:
    made = grid_waves((3, 5), 16).reshape(3, 5, 16)
    for row in range(3):
        for column in range(5):
            expected = minicpm_oracle.waves(column, 8) + minicpm_oracle.waves(row, 8)
            torch.testing.assert_close(made[row, column], torch.tensor(expected))


VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, patch_size=7, image_size=70
)


def encoder(**over: Any) -> dict[str, Any]:
    raw = {"architectures": ["MiniCPMV"], "version": 2.6, "hidden_size": 256, "query_num": 6, "vision_config": VISION}
    return equivalent_of(raw | over)[0]


@pytest.mark.parametrize(("over", "error", "said"), [
    ({"vision_config": [1]}, CheckpointError, "vision_config must be a mapping, not"),
    ({"vision_config": VISION | {"image_size": 10**9}}, CheckpointError, "image_size"),
    ({"vision_config": VISION | {"patch_size": 0}}, CheckpointError, "patch_size"),
    ({"vision_config": VISION | {"hidden_size": "x"}}, CheckpointError, "hidden_size"),
    ({"vision_config": VISION | {"num_hidden_layers": 10**6}}, CheckpointError, "num_hidden_layers"),
    ({"vision_config": VISION | {"num_attention_heads": 3}}, ConfigError, "hidden_size = 32 of vision_config is no"),
    ({"vision_config": VISION | {"image_size": 6}}, ConfigError, "image_size = 6 of vision_config is less than"),
    ({"vision_config": VISION | {"hidden_size": 65536, "intermediate_size": 1 << 18}}, CheckpointError,
     "the encoder of this configuration has 103112507392 weights; the limit is 8589934592"),
    ({"vision_config": VISION | {"image_size": 16384, "patch_size": 1}}, CheckpointError, "weights; the limit is"),
    ({"query_num": 10**9}, CheckpointError, "query_num"),
    ({"query_num": 0}, CheckpointError, "query_num"),
    ({"hidden_size": None}, CheckpointError, "hidden_size"),
    ({"hidden_size": -128}, CheckpointError, "hidden_size"),
    ({"hidden_size": 200}, ConfigError, "hidden_size = 200 is not a multiple of 128"),
    ({"version": 2.0}, NotBuiltError, "MiniCPMV with version = 2.0 is not in this version of Quire"),
    ({"version": {"x": 1}}, NotBuiltError, "version"),
    ({"version": None, "hidden_size": 2304, "query_num": 64}, NotBuiltError, "version = '2.0'"),
])  # fmt: skip
def test_hostile_configurations(over: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        encoder(**over)


def test_what_files_leave_out() -> None:
    """As the releases' own classes fill it in."""
    assert encoder(vision_config=None)["vision_config"]["num_hidden_layers"] == 26  # the last layer is left out
    kept = encoder(vision_config=None, drop_vision_last_layer=False)
    assert kept["vision_config"]["num_hidden_layers"] == 27 and kept["vision_config"]["image_size"] == 980
    assert encoder(version=None)["places_in_a_row"] and encoder(version="2.5")["places_in_a_row"]
    assert not encoder(version=4)["places_in_a_row"]


def test_a_checkpoint_that_lacks_tensors(tmp_path: Path) -> None:
    make_model("MiniCPMV 2.6", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["resampler.attn.in_proj_weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing \(resampler.attn.in_proj_weight"):
        tower_of(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read as MiniCPMVTowers"):
        tower_of(tmp_path, query_num=7)


@torch.inference_mode()
def test_vectors_of_audio(tmp_path: Path) -> None:
    """Pieces of any length, of which each second sees those before it."""
    model = make_model("MiniCPMO", tmp_path)
    tower = tower_of(tmp_path)
    for lens in ([60], [4, 59, 33], [80, 5]):
        arrays = {"input_features": torch.randn(len(lens), 16, max(lens)), "piece_lens": torch.tensor(lens)}
        vectors = tower.encode("audio", arrays)
        assert len(vectors) == sum((count + 1) // 2 // 2 for count in lens)
        torch.testing.assert_close(vectors, model.get_audio_features(**arrays), atol=2e-4, rtol=1e-3)
    later = arrays["input_features"].clone()
    later[0, :, 2 * minicpm_oracle.CHUNK + 2 :] = 1.0  # what the first chunk does not see
    changed = tower.encode("audio", arrays | {"input_features": later})
    num = minicpm_oracle.CHUNK // 2
    torch.testing.assert_close(changed[:num], vectors[:num])
    assert (changed - vectors)[num:20].abs().max(-1).values.min() > 1e-3
    for lens in ([81, 5], [0, 5], [60]):
        with pytest.raises(ValueError, match="2 pieces of 80 frames at most have lengths of"):
            tower.encode("audio", arrays | {"piece_lens": torch.tensor(lens)})


AUDIO = minicpm_oracle.AUDIO


@pytest.mark.parametrize(("over", "error", "said"), [
    ({"audio_config": [1]}, CheckpointError, "audio_config must be a mapping, not"),
    ({"audio_config": AUDIO | {"encoder_layers": 10**6}}, CheckpointError, "encoder_layers"),
    ({"audio_config": AUDIO | {"encoder_layers": [1]}}, CheckpointError, r"encoder_layers is \[1\]; expected"),
    ({"audio_config": AUDIO | {"encoder_attention_heads": 5}}, ConfigError, "d_model = 32 of audio_config is not"),
    ({"audio_config": AUDIO | {"d_model": 1 << 16, "encoder_layers": 9}}, CheckpointError, "weights; the limit is"),
    ({"audio_pool_step": 0}, CheckpointError, "audio_pool_step=0"),
    ({"audio_chunk_length": 0}, CheckpointError, "audio_chunk_length is 0; expected seconds from 0.02 to 3600"),
    ({"audio_chunk_length": "1"}, CheckpointError, "audio_chunk_length is '1'"),
    ({"audio_chunk_length": float("nan")}, CheckpointError, "audio_chunk_length is nan"),
    ({"version": 4.5}, NotBuiltError, "MiniCPMO with version = 4.5 is not in this version of Quire; built are 2.6"),
])  # fmt: skip
def test_a_hostile_configuration_of_what_hears(over: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        encoder(**{"architectures": ["MiniCPMO"], "audio_config": AUDIO} | over)
