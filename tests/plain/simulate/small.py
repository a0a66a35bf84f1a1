"""Small scenarios: a tiny model whose steps take about a millisecond, and short requests."""

from __future__ import annotations

from typing import Any

from quire.sched.settings import SchedulerSettings
from quire.simulate.devices import H200
from quire.simulate.scenario import Scenario
from quire.simulate.shape import ModelShape, read_shape
from quire.simulate.workload import Workload

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip


def shape(**changes: Any) -> ModelShape:
    return read_shape(CONFIG | changes, "tiny")


def scenario(**options: Any) -> Scenario:
    settings = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 64, "latency_goal": 0.012}
    settings |= options.pop("settings", {})
    load = {"input_len": 100, "output_len": 20} | options.pop("load", {})
    options.setdefault("num_requests", 40)
    options.setdefault("memory_utilization", 0.05)  # some hundred KV blocks
    return Scenario(
        shape=shape(), device=H200, settings=SchedulerSettings(**settings), workload=Workload(**load), **options
    )
