"""Attention within texts and sums of texts by the kernels on a GPU, against torch; and an encoder's vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("window", "slopes"), [(0, False), (0, True), (3, False), (70, False)])
def test_attention(window: int, slopes: bool, dtype: torch.dtype) -> None:
    from tests import text_cases as cases

    cases.check_attention("cuda", dtype, 12, 12, 64, window, slopes, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 2, 32), (4, 1, 80), (2, 2, 128), (2, 1, 256)])
def test_sizes_of_heads(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from tests import text_cases as cases

    cases.check_attention("cuda", dtype, *shape, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_text_alone(dtype: torch.dtype) -> None:
    from tests import text_cases as cases

    cases.check_alone("cuda", dtype)
    for width in (32, 768):
        cases.check_sums("cuda", dtype, width)


def test_other_keys_than_queries() -> None:
    from tests import text_cases as cases

    cases.check_cross("cuda", torch.float32)


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_vectors_of_an_encoder(tmp_path: Path, pooling: str) -> None:
    """Many texts through several steps: each vector is that of transformers in float32."""
    from transformers import BertConfig, BertModel

    from quire import LLM
    from quire.config import PoolerConfig

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128,
    )  # fmt: skip
    model = BertModel(shape, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(1, 100, (150,), generator=generator).tolist()
    prompts = [torch.randint(0, 500, (count,), generator=generator).tolist() for count in lens]
    llm = LLM(
        str(tmp_path), runner="pooling", dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=512,
        max_model_len=128, gpu_memory_utilization=0.3, pooler_config=PoolerConfig(pooling_type=pooling),
    )  # fmt: skip
    assert llm.llm_engine.front.config.scheduler_config.async_scheduling
    found = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, one in zip(prompts, found, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        wanted = {"MEAN": hidden.mean(0), "CLS": hidden[0], "LAST": hidden[-1]}[pooling]
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
        torch.testing.assert_close(torch.tensor(one.outputs.embedding), wanted, atol=1e-4, rtol=1e-4)
