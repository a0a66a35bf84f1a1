"""The image encoder of DeepSeek-VL2: its vectors equal those of transformers' SigLIP with a projector in plain torch,
in the order that a prompt has them; what its configuration must not say is refused before anything is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.hf_models.equivalents import equivalent_of
from quire.hf_models.towers import Tower, load_tower
from quire.schema.errors import CheckpointError, NotBuiltError
from tests import deepseek_vl2
from tests.deepseek_vl2 import SIDE
from tests.media_models import make_model

NAME = "DeepseekVLV2ForCausalLM"
CPU = torch.device("cpu")


def tower_of(folder: Path, **options: Any) -> Tower:
    raw = json.loads((folder / "config.json").read_text())
    return load_tower(raw, str(folder), dtype=torch.float32, device=CPU, **options)


@pytest.mark.parametrize("name", [NAME, f"{NAME} base"])  # the whole image before its tiles, and behind them
def test_vectors_equal(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    tower = tower_of(tmp_path)
    for columns, rows in ((1, 1), (2, 1), (1, 3), (2, 2)):
        arrays = {
            "pixel_values": torch.randn(1 + columns * rows, 3, SIDE, SIDE),
            "images_spatial_crop": torch.tensor([[columns, rows]]),
        }
        with torch.inference_mode():
            ours, theirs = tower.encode("image", arrays), model.get_image_features(**arrays)
        assert ours.shape == theirs.shape == (len(deepseek_vl2.tokens(arrays)), 64)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert float(theirs.std()) > 0.1
        with pytest.raises(ValueError, match="pictures for the whole image and a grid"):
            tower.encode("image", arrays | {"images_spatial_crop": torch.tensor([[columns, rows + 1]])})
    with pytest.raises(ValueError, match=r"the encoder takes \[3, 28, 28\]"):
        tower.encode("image", {"pixel_values": torch.zeros(2, 3, 29, 29), "images_spatial_crop": torch.ones(1, 2)})


def test_sizes_have_the_defaults_of_released_configurations() -> None:
    raw = {"vision_config": {"layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152}}
    config, names = equivalent_of({"architectures": [NAME], "auto_map": {"AutoConfig": "code.Config"}, **raw})
    assert names == {} and config["is_whole_first"]
    vision, projector = config["vision_config"], config["projector_config"]
    assert (vision["image_size"], vision["heads"]) == (384, 16) and int(1152 * vision["mlp_ratio"]) == 4304
    assert [projector[name] for name in ("input_dim", "n_embed", "depth", "downsample_ratio")] == [1152, 2048, 2, 2]
    assert not {"auto_map", "language_config"} & config.keys()


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"vision_config": [1]}, "vision_config must be a mapping, not"),
    ({"projector_config": 7}, "projector_config must be a mapping, not"),
    ({"language_config": "x"}, "language_config must be a mapping, not"),
    ({"vision_config": {"layers": 10**9}}, "layers"),
    ({"vision_config": {"width": 1 << 20}}, "width"),
    ({"vision_config": {"width": "1152"}}, "width"),
    ({"vision_config": {"width": 1152, "heads": 7}}, "a width of 1152 is not a multiple of its 7 heads"),
    ({"vision_config": {"width": 1152, "heads": 0}}, "heads"),
    ({"vision_config": {"width": 1152, "mlp_ratio": 1e9}}, "mlp_ratio"),
    ({"vision_config": {"width": 1152, "mlp_ratio": float("nan")}}, "mlp_ratio"),
    ({"vision_config": {"width": 1152, "image_size": 32768, "patch_size": 1}}, "1073741824 patches of 1"),
    ({"vision_config": {"width": 1152, "image_size": 8, "patch_size": 14}}, "0 patches of 14"),
    ({"vision_config": {"width": 32768, "layers": 512}, "projector_config": {"input_dim": 32768}},
     "an encoder of [0-9]+ weights; the limit is 8589934592"),
    ({"vision_config": {"width": 1152}, "projector_config": {"depth": 1}}, "depth"),
    ({"vision_config": {"width": 1152}, "projector_config": {"downsample_ratio": 0}}, "downsample_ratio"),
    ({"vision_config": {"width": 1152}, "projector_config": {"input_dim": 64}}, "input_dim is 64, but .* is 1152"),
    ({"vision_config": {"width": 1152}, "language_config": {"hidden_size": 64}}, "n_embed is 2048, but .* is 64"),
    ({"vision_config": {"width": 1152}, "global_view_pos": "middle"}, "global_view_pos is 'middle'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), HOSTILE)
def test_a_hostile_configuration(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        equivalent_of({"architectures": [NAME], **given})


@pytest.mark.parametrize("given", [
    {"tile_tag": "1D"}, {"projector_config": {"projector_type": "linear"}},
    {"projector_config": {"token_pooling": True}}, {"vision_config": {"class_token": True}},
    {"vision_config": {"ignore_head": False}},
])  # fmt: skip
def test_what_no_released_checkpoint_has_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match=r"DeepSeek-VL2 with \w+ = .* is not built"):
        equivalent_of({"architectures": [NAME], **given})


@pytest.mark.parametrize(("over", "said"), [
    ({"topk_method": "other"}, "topk_method = 'other' is not supported"),
    ({"scoring_func": "other"}, "scoring_func = 'other' is not supported"),
    ({"qk_rope_head_dim": 0}, "Mla.rope = 0"),
])  # fmt: skip
def test_a_hostile_language_model(over: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = deepseek_vl2.config("small")
    raw["language_config"] |= over
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Exception, match=said):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", dtype="float32")


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(deepseek_vl2.config("tiny")))
    arrays = deepseek_vl2.drawn(torch.Generator().manual_seed(1))
    with torch.inference_mode():
        vectors = tower_of(tmp_path, is_dummy=True).encode("image", arrays)
    assert vectors.shape == (len(deepseek_vl2.tokens(arrays)), 64) and bool(vectors.isfinite().all())


def test_released_sizes_and_types() -> None:
    """Shapes alone: nothing is computed."""
    nowhere = torch.device("meta")
    raw = {
        "architectures": [NAME],
        "vision_config": {"layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152},
    }
    tower = load_tower(raw, "", dtype=torch.bfloat16, device=nowhere, is_dummy=True)
    pixels = torch.empty(7, 3, 384, 384, device=nowhere)
    vectors = tower.encode("image", {"pixel_values": pixels, "images_spatial_crop": torch.tensor([[3, 2]])})
    assert vectors.shape == (14 * 15 + 1 + 28 * 43, 2048) and vectors.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model(NAME, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    arrays = deepseek_vl2.drawn(torch.Generator().manual_seed(3))
    with torch.inference_mode():
        exact = tower_of(tmp_path).encode("image", arrays)
        ours = load_tower(raw, str(tmp_path), dtype=dtype, device=CPU).encode("image", arrays)
    assert ours.dtype == dtype
    assert float(torch.nn.functional.cosine_similarity(exact, ours.float()).min()) > 0.999
