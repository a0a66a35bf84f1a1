"""Data parallelism with real models: replicas answer as one engine does, to the bit, and together with tensor ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.base import env
from quire.schema.params import StructuredOutputsParams
from tests.tiny_adapters import write_adapter
from tests.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
OPTIONS: dict[str, Any] = dict(device="cpu", max_model_len=192, num_gpu_blocks_override=80, block_size=16, seed=0)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_adapter(make_tiny("LlamaForCausalLM", made), made / "adapter", targets=LINEARS)
    return made


def answers(llm: LLM, folder: Path) -> list[Any]:
    """Greedy and drawn, with a grammar and with an adapter; token ids and the bits of their log probabilities."""
    rng = random.Random(3)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(4, VOCAB) for _ in range(rng.choice((2, 9, 40, 70)))]} for _ in range(8)
    ]
    plain = dict(max_tokens=10, ignore_eos=True, logprobs=0)
    params = [SamplingParams(temperature=0, **plain), SamplingParams(temperature=0.9, **plain)] * 4
    loras: list[LoRARequest | None] = [None] * 8
    loras[2] = loras[5] = LoRARequest("mine", 1, str(folder / "adapter"))
    form = StructuredOutputsParams(json=SCHEMA)
    prompts += ["Say: ", "Say it: "]
    params += [SamplingParams(temperature=0, max_tokens=24, logprobs=0, structured_outputs=form)] * 2
    done = llm.generate(prompts, params, use_tqdm=False, lora_request=[*loras, None, None])
    tables = [one.outputs[0] for one in done]
    return [(one.token_ids, [entry[t].logprob for t, entry in zip(one.token_ids, one.logprobs, strict=True)])
            for one in tables]  # fmt: skip


def answered(folder: Path, **options: Any) -> tuple[list[Any], list[Any], list[int]]:
    llm = LLM(str(folder), enable_lora=True, disable_log_stats=False, **OPTIONS | options)
    try:
        counts = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens"}
        assert set(counts.values()) == {0}
        results = answers(llm, folder)
        counts = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens"}
        blocks = [m.labels["num_gpu_blocks"] for m in llm.get_metrics() if m.name == "vllm:cache_config_info"]
        assert set(blocks) == {"80"} and len(blocks) == len(counts)
        assert llm.list_loras() == {1} and llm.remove_lora(1) and llm.list_loras() == set()
        return results, list(counts.values()), llm.collective_rpc("tests.rank_probe:pid_of")
    finally:
        llm.close()


def test_two_engines_answer_as_one_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    one, (alone,), _ = answered(folder)
    two, shared, pids = answered(folder, data_parallel_size=2)
    assert two == one and one[0] != one[2]
    assert sum(shared) == alone and min(shared) > 0 and len(set(pids)) == 2


def test_tensor_ranks_in_each_of_two_engines(folder: Path) -> None:
    one, _, _ = answered(folder, dtype="float32")
    four, shared, pids = answered(folder, dtype="float32", data_parallel_size=2, tensor_parallel_size=2)
    for (ids, values), (other_ids, other_values) in zip(four, one, strict=True):
        assert ids == other_ids and values == pytest.approx(other_values, abs=1e-4)
    assert min(shared) > 0 and len(set(pids)) == 4
