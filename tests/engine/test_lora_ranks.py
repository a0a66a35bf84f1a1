"""Adapters on several ranks through the whole engine: what transformers computes with merged weights, while adapters
are loaded and unloaded. tests/models/test_adapter_ranks.py has more architectures, with ranks as threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LoRARequest
from tests.engine.lora_answers import check_like_merged, start
from tests.tiny_adapters import TinyAdapter, expert_modules, linear_modules, write_adapter
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
ENDS = ("embed_tokens", "lm_head")


def write_both(model: Any, folder: Path) -> list[TinyAdapter]:
    """One of everything, with a rank that ranks do not divide evenly; one of some layers."""
    everything = linear_modules(model, None) | linear_modules(model, ENDS) | expert_modules(model, (0, 1, 3))
    return [
        write_adapter(model, folder / "everything", modules=everything, rank=5, seed=1),
        write_adapter(model, folder / "some", targets=("q_proj", "o_proj"), rank=8, seed=2),
    ]


@pytest.mark.parametrize("both", [False, True], ids=["one half", "both"])
def test_two_ranks(both: bool, tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    first, second = write_both(model, tmp_path)
    third = write_adapter(model, tmp_path / "third", rank=1, seed=3)
    with start(tmp_path / "model", tensor_parallel_size=2, fully_sharded_loras=both, max_cpu_loras=2) as llm:
        check_like_merged(llm, model, [first, second], different=3)
        assert llm.collective_rpc("tests.rank_probe:cuts_adapters") == [both] * 2
        one, two = llm.collective_rpc("tests.rank_probe:adapter_bytes")
        whole = sum(tensor.nbytes for adapter in (first, second) for low in adapter.parts.values()
                    for tensor in (low.a, low.b))  # fmt: skip
        assert (one + two == whole and max(one, two) < 0.55 * whole) if both else one + two > 1.3 * whole
        assert llm.remove_lora(1) and llm.add_lora(LoRARequest("a0", 1, third.path))
        check_like_merged(llm, model, [third, second], different=3)
        assert llm.list_loras() == {1, 2}


@pytest.mark.parametrize(
    ("arch", "engines"),
    [("LlamaForCausalLM", 1), pytest.param("Qwen3MoeForCausalLM", 2, marks=pytest.mark.long)],  # eight processes
)
def test_ranks_in_stages(arch: str, engines: int, tmp_path: Path) -> None:
    """Ranks sum within their stage; of several engines, the ranks of a stage share its experts."""
    model = make_tiny(arch, tmp_path / "model")
    adapters = write_both(model, tmp_path)
    options = dict(tensor_parallel_size=2, pipeline_parallel_size=2, fully_sharded_loras=True)
    if engines > 1:
        options |= dict(data_parallel_size=engines, enable_expert_parallel=True)
    with start(tmp_path / "model", **options) as llm:
        for _ in range(engines):
            check_like_merged(llm, model, adapters, different=3)
        assert llm.collective_rpc("tests.rank_probe:cuts_adapters") == [True] * 4 * engines


@pytest.mark.parametrize(
    "more",
    [{}, {"enable_eplb": True, "eplb_config": {"step_interval": 2, "num_redundant_experts": 1}}],
    ids=["placed", "moving"],
)
def test_whole_experts(more: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    adapters = write_both(model, tmp_path)
    options = dict(tensor_parallel_size=2, enable_expert_parallel=True, fully_sharded_loras=not more, **more)
    with start(tmp_path / "model", **options) as llm:
        for _ in range(2):
            check_like_merged(llm, model, adapters, different=3)
        assert len(set(llm.collective_rpc("tests.rank_probe:adapter_bytes"))) == (1 if more else 2)
        moved = llm.collective_rpc("tests.rank_probe:moves_of")
        assert all((count > 0) is bool(more) for _, count in moved)
