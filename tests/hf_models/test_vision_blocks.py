"""Blocks of vision encoders with Quire's kernels give what transformers' classes give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.hf_models.towers import attend_packed, load_tower
from quire.hf_models.vision_blocks import PatchProjection, VisionBlock, fuse_blocks
from quire.ops.op import Kernels
from tests.media_models import draw_item, make_model


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration video"])
def test_fused_blocks_equal_the_classes(name: str, tmp_path: Path) -> None:
    model, cpu = make_model(name, tmp_path), torch.device("cpu")
    item = draw_item(name, model, 1)
    raw = model.config.to_dict() | {"architectures": [name.partition(" ")[0]]}
    tower = load_tower(raw, str(tmp_path), dtype=torch.float32, device=cpu)
    with torch.inference_mode():
        expected = tower.encode(item.modality, item.arrays)
        fuse_blocks(tower.module, Kernels.here(cpu))
        found = tower.encode(item.modality, item.arrays)
    kinds = [type(part) for part in tower.module.modules()]
    assert kinds.count(VisionBlock) == model.config.vision_config.depth and kinds.count(PatchProjection) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


PACKED = (
    "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Glm4vForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "VideoLlama3ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "GlmOcrForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_attention_equals_a_call_for_each_window(name: str, tmp_path: Path) -> None:
    model, cpu = make_model(name, tmp_path), torch.device("cpu")
    item = draw_item(name, model, 2)
    raw = model.config.to_dict() | {"architectures": [name]}
    tower = load_tower(raw, str(tmp_path), dtype=torch.float32, device=cpu)
    with torch.inference_mode():
        expected = tower.encode(item.modality, item.arrays)
        attend_packed(tower.module)
        parts = [part for part in tower.module.modules() if "config" in part.__dict__]
        assert any(part.config._attn_implementation == "quire_flash" for part in parts)
        found = tower.encode(item.modality, item.arrays)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
