"""Hundreds of adapters through eight slots, while the base model and one adapter are asked without pause."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import EngineArgs, LLMEngine, LoRARequest, SamplingParams
from quire.loader.adapter import HostAdapter
from tests.products import marked
from tests.tiny_adapters import write_folder
from tests.tiny_models import write_tiny

NUM_SLOTS, NUM_COPIES = 8, 16
NUM_WAITING = 40  # requests of these that wait or run at any time
PROMPT: Any = {"prompt_token_ids": [5, 9, 77, 100]}
BRIEF = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BUSY = 0  # the number of an adapter beside them


def tokens_of(number: int) -> set[int]:
    """An adapter makes one of two tokens certain; no two adapters have the same pair."""
    return {4 + number % 150, 160 + (number * 7 + number // 150) % 150}


def write_head(folder: Path, number: int) -> LoRARequest:
    """Of rank 1: what it adds to one logit it takes from the other."""
    draw = torch.Generator().manual_seed(number)
    b = torch.zeros(320, 1)
    first, second = sorted(tokens_of(number))
    b[first], b[second] = 1e6, -1e6
    stem = "base_model.model.lm_head.lora_"
    tensors = {f"{stem}A.weight": torch.randn((1, 64), generator=draw), f"{stem}B.weight": b}
    write_folder(folder, tensors, {"r": 1, "lora_alpha": 1, "target_modules": ["lm_head"]})
    return LoRARequest(f"a{number}", number + 1, str(folder))


def num_copies() -> int:
    gc.collect()
    return sum(type(one) is HostAdapter for one in gc.get_objects())


@pytest.mark.parametrize("num_adapters", marked([300, 1000], [300]))
def test_none_starves_and_none_stays(num_adapters: int, tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path / "model", num_hidden_layers=1)
    loras = [write_head(tmp_path / f"a{number}", number) for number in range(num_adapters + 1)]
    args = EngineArgs(
        model=str(tmp_path / "model"), dtype="float32", enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=8,
        max_cpu_loras=NUM_COPIES, max_model_len=32, max_num_seqs=16, kv_cache_memory_bytes=1 << 22, seed=0,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args)
    before = num_copies()  # of other tests' engines
    todo = iter(range(1, num_adapters + 1))
    waiting: dict[int, int] = {}  # adapter -> how many that came later were served first
    most_overtaken = num_done = num_base = num_busy = 0
    try:
        while num_done < num_adapters:
            while len(waiting) < NUM_WAITING and (number := next(todo, None)) is not None:
                waiting[number] = 0
                engine.add_request(str(number), PROMPT, BRIEF, lora_request=loras[number])
            if num_base == num_busy == 0:
                engine.add_request("base 0", PROMPT, LONGER)
                engine.add_request("busy 0", PROMPT, LONGER, lora_request=loras[BUSY])
                num_base = num_busy = 1
            for answer in engine.step():
                if not answer.finished:
                    continue
                kind, _, _ = answer.request_id.partition(" ")
                if kind == "base":
                    engine.add_request(f"base {num_base}", PROMPT, LONGER)
                    num_base += 1
                    continue
                tokens = set(answer.outputs[0].token_ids)
                if kind == "busy":
                    assert tokens <= tokens_of(BUSY)
                    engine.add_request(f"busy {num_busy}", PROMPT, LONGER, lora_request=loras[BUSY])
                    num_busy += 1
                    continue
                number = int(kind)
                assert tokens <= tokens_of(number), number
                most_overtaken = max(most_overtaken, waiting.pop(number))
                for other in waiting:
                    waiting[other] += other < number
                num_done += 1
                if num_done in (num_adapters // 5, num_adapters):
                    assert num_copies() - before <= NUM_COPIES + NUM_SLOTS
        assert most_overtaken < num_adapters // 2, "an adapter waited while half of all, which came later, were served"
        assert num_base > 3 and num_busy > 3, "requests of the base model and of a busy adapter wait for the others"
    finally:
        engine.close()
