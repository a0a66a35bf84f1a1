"""Blocks of vision encoders with Quire's kernels give what transformers' classes give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.hf_models.towers import load_tower
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
