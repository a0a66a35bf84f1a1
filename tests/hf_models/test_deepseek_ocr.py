"""The image encoder of DeepSeek-OCR: its vectors equal those of transformers' Segment Anything and CLIP with tables of
positions stretched apart from them; what its configuration must not say is refused before anything is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.hf_models.equivalents import equivalent_of
from quire.hf_models.towers import Tower, load_tower
from quire.schema.errors import CheckpointError, NotBuiltError
from tests import deepseek_ocr
from tests.deepseek_ocr import TILE
from tests.media_models import make_model

NAME = "DeepseekOCRForCausalLM"
SAM, CLIP = "sam_vit_b", "clip-l-14-224"


def tower_of(folder: Path, **options: Any) -> Tower:
    raw = json.loads((folder / "config.json").read_text())
    return load_tower(raw, str(folder), dtype=torch.float32, device=torch.device("cpu"), **options)


def test_vectors_equal(tmp_path: Path) -> None:
    """With tiles and without, and with whole images smaller and larger than what SAM is made for."""
    model = make_model(NAME, tmp_path)
    tower = tower_of(tmp_path)
    for base, columns, rows in ((256, 2, 1), (256, 1, 3), (256, 1, 1), (128, 1, 1), (320, 1, 1)):
        arrays = {
            "pixel_values": torch.randn(1, 3, base, base), "images_spatial_crop": torch.tensor([[columns, rows]]),
        }  # fmt: skip
        if rows * columns > 1:
            arrays["images_crop"] = torch.randn(rows * columns, 3, TILE, TILE)
        with torch.inference_mode():
            ours, theirs = tower.encode("image", arrays), torch.stack(model.image(arrays))
        assert ours.shape == theirs.shape == (len(deepseek_ocr.tokens(arrays)), 64)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert float(theirs.std()) > 0.1
        with pytest.raises(ValueError, match="tiles for a grid of"):
            tower.encode("image", arrays | {"images_spatial_crop": torch.tensor([[columns + 1, rows]])})


def test_sizes_have_the_defaults_of_the_released_code() -> None:
    config, names = equivalent_of({"architectures": [NAME], "auto_map": {"AutoConfig": "code.Config"}})
    sam, clip = config["sam_config"], config["clip_config"]
    assert (sam["hidden_size"], sam["num_hidden_layers"], sam["image_size"]) == (768, 12, 1024)
    assert sam["downsample_channels"] == [512, 1024] and sam["global_attn_indexes"] == [2, 5, 8, 11]
    assert (clip["width"], clip["layers"], clip["places"]) == (1024, 24, 256)
    assert config["projector_config"] == {"input_dim": 2048, "n_embed": 1280}
    assert len(names) == 11 and not {"auto_map", "language_config"} & config.keys()


def widths(**parts: Any) -> dict[str, Any]:
    return {"vision_config": {"width": {SAM if name == "sam" else CLIP: part for name, part in parts.items()}}}


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"vision_config": [1]}, "vision_config must be a mapping, not"),
    ({"vision_config": {"width": 7}}, "width must be a mapping, not 7"),
    (widths(sam=3), "sam_vit_b must be a mapping, not 3"),
    ({"vision_config": {"image_size": 10**6}}, "image_size"),
    ({"vision_config": {"image_size": 8}}, "image_size"),
    (widths(sam={"layers": 10**9}), "layers"),
    (widths(sam={"width": [768]}), "width is .*; expected a number from 1 to 32768"),
    (widths(sam={"heads": 7}), "sam_vit_b: a width of 768 is not a multiple of its 7 heads"),
    (widths(sam={"downsample_channels": [512]}), "downsample_channels has 1 numbers; expected 2"),
    (widths(sam={"downsample_channels": [512, "1024"]}), "downsample_channels is .*; expected whole numbers"),
    (widths(sam={"downsample_channels": [512, 10**9]}), "downsample_channels is .*; expected whole numbers up to"),
    (widths(sam={"downsample_channels": [512, 64]}), r"downsample_channels\[1\] is 64, but .* is 1024"),
    (widths(sam={"global_attn_indexes": 3}), "global_attn_indexes is 3; expected whole numbers"),
    (widths(sam={"global_attn_indexes": [0] * 10**5}), "global_attn_indexes is .*; expected whole numbers"),
    (widths(clip={"image_size": 32768, "patch_size": 1}), "clip-l-14-224 has 1073741824 places"),
    (widths(clip={"patch_size": 500}), "clip-l-14-224 has 0 places"),
    (widths(sam={"width": 32768, "heads": 1, "layers": 512}), "an encoder of [0-9]+ weights; the limit is 8589934592"),
    ({"projector_config": {"input_dim": 64}}, "projector_config.input_dim is 64, but the width of both"),
    ({"language_config": {"hidden_size": 64}}, "n_embed is 1280, but .* is 64"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), HOSTILE)
def test_a_hostile_configuration(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        equivalent_of({"architectures": [NAME], **given})


def test_other_projectors_are_refused_by_name() -> None:
    with pytest.raises(NotBuiltError, match="DeepSeek-OCR with projector_type = 'mlp_gelu' is not built"):
        equivalent_of({"architectures": [NAME], "projector_config": {"projector_type": "mlp_gelu"}})


SECOND = "DeepseekOCR2ForCausalLM"


def test_the_second_has_the_sizes_of_the_released_code() -> None:
    """Files say 1024 of the channels beside an encoder of 896."""
    channels = {"downsample_channels": [512, 1024]}
    given = {"vision_config": {"width": {SAM: channels, "qwen2-0-5b": {"dim": 896}}}}
    config, _ = equivalent_of({"architectures": [SECOND], "auto_map": {"AutoConfig": "code.Config"}, **given})
    sam, encoder = (config["vision_config"][f"{name}_config"] for name in ("sam", "encoder"))
    assert sam["downsample_channels"] == [512, 896] and (sam["image_size"], sam["window_size"]) == (1024, 14)
    assert (encoder["hidden_size"], encoder["num_hidden_layers"], encoder["intermediate_size"]) == (896, 24, 4864)
    assert (encoder["num_attention_heads"], encoder["num_key_value_heads"]) == (14, 2)
    assert config["text_config"]["hidden_size"] == 1280 and "auto_map" not in config


def qwen2(**part: Any) -> dict[str, Any]:
    return {"vision_config": {"width": {"qwen2-0-5b": part}}}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"vision_config": {"width": {"qwen2-0-5b": 3}}}, CheckpointError, "qwen2-0-5b must be a mapping, not 3"),
        (qwen2(layers=10**9), CheckpointError, "layers"),
        (qwen2(heads=5), CheckpointError, "qwen2-0-5b: a width of 896 is not a multiple of its 5 heads"),
        (qwen2(kv_heads=4), CheckpointError, "qwen2-0-5b: 14 heads are not a multiple of 4 kv_heads"),
        (qwen2(dim=28672, heads=14, layers=512), CheckpointError, "an encoder of [0-9]+ weights; the limit is"),
        (widths(sam={"heads": 7}), CheckpointError, "sam_vit_b: a width of 768 is not a multiple of its 7 heads"),
        ({"projector_config": {"input_dim": 64}}, CheckpointError, "input_dim is 64, but the width of qwen2-0-5b"),
        ({"projector_config": {"projector_type": "mlp"}}, NotBuiltError, "DeepSeek-OCR 2 with projector_type = 'mlp'"),
        ({"vision_config": {"image_size": 512}}, NotBuiltError, "image_size = 512 is not built: 1024 is"),
        ({"language_config": {"vocab_size": 10**12}}, CheckpointError, "vocab_size=1000000000000"),
    ],
)  # fmt: skip
def test_a_hostile_configuration_of_the_second(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        equivalent_of({"architectures": [SECOND], **given})


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(deepseek_ocr.config()))
    arrays = deepseek_ocr.drawn(torch.Generator().manual_seed(1))
    with torch.inference_mode():
        vectors = tower_of(tmp_path, is_dummy=True).encode("image", arrays)
    assert vectors.shape == (len(deepseek_ocr.tokens(arrays)), 64) and bool(vectors.isfinite().all())


def test_released_sizes_and_types() -> None:
    """Shapes alone: nothing is computed."""
    nowhere = torch.device("meta")
    tower = load_tower({"architectures": [NAME]}, "", dtype=torch.bfloat16, device=nowhere, is_dummy=True)
    arrays = {
        "pixel_values": torch.empty(1, 3, 1024, 1024, device=nowhere), "images_spatial_crop": torch.tensor([[3, 2]]),
        "images_crop": torch.empty(6, 3, 640, 640, device=nowhere),
    }  # fmt: skip
    vectors = tower.encode("image", arrays)
    assert vectors.shape == (16 * 17 + 1 + 20 * 31, 1280) and vectors.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model(NAME, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    arrays = deepseek_ocr.drawn(torch.Generator().manual_seed(3))
    with torch.inference_mode():
        exact = tower_of(tmp_path).encode("image", arrays)
        ours = load_tower(raw, str(tmp_path), dtype=dtype, device=torch.device("cpu")).encode("image", arrays)
    assert ours.dtype == dtype
    assert float(torch.nn.functional.cosine_similarity(exact, ours.float()).min()) > 0.999
