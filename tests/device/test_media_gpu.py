"""Models that take media on a GPU: greedy tokens equal transformers' on CPU, in float32, however the work is cut up and
whoever runs beside; and in 16 bits encoders that read packed windows give what transformers' own way gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.hf_models import towers
from quire.hf_models.towers import Tower, load_tower
from quire.sched.gates import TokenBudget
from tests.engine.test_media_models import Served, text
from tests.media_models import draw_item, is_greedy, make_model

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
FAMILIES = (
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration video",
    "PaliGemmaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Molmo2ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma3nForConditionalGeneration audio",
    "MolmoForCausalLM", "MolmoForCausalLM experts",
    "MiniCPMV 2.6", "MiniCPMV video",
    "DeepseekVLV2ForCausalLM", "DeepseekVLV2ForCausalLM small", "DeepseekOCRForCausalLM",
    "UltravoxModel",
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tmp_path_factory.mktemp("media")


@pytest.fixture
def served(folder: tuple[str, Path]) -> Iterator[Served]:
    made = Served(*folder, **OPTIONS)
    yield made
    made.llm.close()


def test_tokens_equal_transformers(served: Served) -> None:
    prompts = [*served.prompts, [text(13, 70)]]
    budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
    encoder = served.scheduler.planner.encoder
    assert encoder is not None
    expected = served.answers(prompts)
    for pieces, answer in zip(prompts, expected, strict=True):
        assert is_greedy(served.name, served.model, pieces, answer)
    for pieces, answer in zip(served.longer, served.answers(served.longer), strict=True):
        assert is_greedy(served.name, served.model, pieces, answer)
    if encoder.whole_items and not served.scheduler.kv.caching:
        return  # prompts are computed whole
    for chunk in (64,) if encoder.joined else (64, 20) if encoder.whole_items else (64, 7):
        budget.most = chunk
        assert served.answers(prompts[:2]) == expected[:2], f"with prefix hits, in chunks of {chunk}"
        served.llm.reset_prefix_cache()
        encoder.clear()
        assert served.answers(prompts[1:]) == expected[1:], f"in chunks of {chunk}"


PACKED = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Glm4vForConditionalGeneration")


@pytest.mark.parametrize("name", PACKED)
def test_kernels_of_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, as near to float32 as transformers' own way with a call for each window."""
    model = make_model(name, tmp_path)
    raw = model.config.to_dict() | {"architectures": [name]}
    arrays = {key: value.cuda() for key, value in draw_item(name, model, 1).arrays.items()}
    cuda = torch.device("cuda")

    def encode(tower: Tower) -> torch.Tensor:
        with torch.inference_mode():
            return tower.encode("image", arrays).float()

    exact = encode(load_tower(raw, str(tmp_path), dtype=torch.float32, device=cuda))
    packed = load_tower(raw, str(tmp_path), dtype=torch.bfloat16, device=cuda)
    parts = [part for part in packed.module.modules() if "config" in part.__dict__]
    assert any(part.config._attn_implementation == "quire_flash" for part in parts)
    found = encode(packed)
    monkeypatch.setattr(towers, "attend_packed", lambda module: None)
    monkeypatch.setattr(towers, "fuse_blocks", lambda module, kernels: None)
    usual = encode(load_tower(raw, str(tmp_path), dtype=torch.bfloat16, device=cuda))
    assert (found - exact).norm() < 1.5 * (usual - exact).norm() + 1e-3 * exact.norm()


def test_memory_of_the_encoder_is_left(tmp_path: Path) -> None:
    """By measuring the largest image, unless that is skipped: then the KV cache has these bytes too. What another
    process takes of the GPU between the two starts counts as well: it needs the GPU for itself."""
    make_model("LlavaForConditionalGeneration", tmp_path)
    blocks = []
    for skip in (False, True):
        options = dict(dtype="float32", max_model_len=512, max_num_seqs=8, block_size=16, max_num_batched_tokens=8192)
        with LLM(str(tmp_path), gpu_memory_utilization=0.2, skip_mm_profiling=skip, **options) as llm:
            loop: Any = llm.llm_engine.front.client.loop
            blocks.append(loop.scheduler.kv.pool.num_blocks)
    kept = 8192 * 64 * 4  # bytes of vectors: of those alone, so many blocks
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4
    assert blocks[1] - blocks[0] >= kept // block_bytes
