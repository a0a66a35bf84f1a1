"""Compiled blocks that sum over ranks inside of their call, against layers one by one, which sum between calls."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import EngineArgs
from quire.loader.load import load_model
from quire.ops.cpu.native import kernels
from quire.quant.shard import ShardGroup
from tests.ops.test_cpu_rank_sums import make_ranks
from tests.paged import Paged
from tests.thread_ranks import on_ranks
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
PROMPTS = [[7, 9, 30, 4, 11, 80, 21, 6, 45, 3, 12], [5, 6, 99]]
LOADING = threading.Lock()


def logits_of(folder: Path, group: ShardGroup, options: dict[str, Any], *, by_layers: bool) -> list[Tensor]:
    args = EngineArgs(model=str(folder), max_model_len=64, skip_tokenizer_init=True, device="cpu", **options)
    with LOADING:
        model: Any = load_model(args.create_engine_config(), "cpu", group)
    if by_layers:
        model.layers[0].register_forward_hook(lambda *_: None)
    paged = Paged(model, PROMPTS, block_size=4)
    found = [row for grants in ([(0, 6)], [(0, 4), (1, 2)], [(0, 1), (1, 1)]) for row in paged.step(grants)]
    assert all((stretch._call is not None) != by_layers for stretch in model._stretches)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "quantization": "int8_wo"},
    ],
    ids=["float32", "bfloat16", "float16", "int8"],
)
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen2ForCausalLM"])  # without and with biases
def test_the_same_bits_in_one_call_or_layer_by_layer(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Two numbers have one sum, whoever adds them."""
    write_tiny(arch, tmp_path, hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
    sums = make_ranks(2, 4096)

    def at_once(group: ShardGroup) -> list[Tensor]:
        return logits_of(tmp_path, replace(group, reduce=sums[group.rank]), options, by_layers=False)

    expected = on_ranks(2, lambda group: logits_of(tmp_path, group, options, by_layers=True))
    found = on_ranks(2, at_once)
    for own, other in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True))


def test_sums_of_another_kind_leave_blocks_to_their_layers(tmp_path: Path) -> None:
    """Over gloo, or here over threads: nothing can be summed inside of a call."""
    write_tiny("LlamaForCausalLM", tmp_path)
    called: list[bool] = []

    def run(group: ShardGroup) -> None:
        args = EngineArgs(
            model=str(tmp_path), dtype="float32", max_model_len=64, skip_tokenizer_init=True, device="cpu"
        )
        with LOADING:
            model: Any = load_model(args.create_engine_config(), "cpu", group)
        Paged(model, PROMPTS, block_size=4).step([(0, 6)])
        called.extend(stretch._call is not None for stretch in model._stretches)

    on_ranks(2, run)
    assert called == [False, False]
