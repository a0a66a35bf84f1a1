"""The GPU worker's step on CPU, with the attention kernels under Triton's interpreter: a real model, the captured
decode step uncaptured, and the tokens of the plain CPU worker."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from tests.worker.test_staged import UncapturedGraphs

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import VOCAB, make_tiny

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")
OPTIONS = {
    "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 8,
    "max_num_batched_tokens": 24, "max_num_seqs": 4, "device": "cpu", "async_scheduling": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "arch",
    ["Qwen3ForCausalLM", "MistralForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "GptOssForCausalLM"],
)
def test_tokens_equal_the_cpu_workers(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.attention.state import WithStates
    from quire.attention.triton import TritonAttention
    from quire.worker import worker as module
    from quire.worker.capture import Capturer
    from quire.worker.device_inputs import DeviceInputs

    make_tiny(arch, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in (3, 20, 9, 31)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5, ignore_eos=True) for i in range(4)]

    def generate() -> list[list[int]]:
        llm = LLM(str(tmp_path), **OPTIONS)
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.close()
        return found

    wanted = generate()
    used: list[UncapturedGraphs] = []
    plain = module.Worker.init_kv

    def init_kv(self: module.Worker, layout: object) -> None:
        """As on a GPU."""
        self._parts = dataclasses.replace(self._parts, select_backend=lambda *_: WithStates(TritonAttention()))
        plain(self, layout)
        runner = self.model_runner
        runner.inputs = DeviceInputs(runner.rows, 64)
        capturer = Capturer(torch.device("cpu"))
        runner.graphs = UncapturedGraphs(
            (1, 2, 4), runner.model, runner.backend, runner.inputs, runner.sampler.plain, capturer, max_context=64
        )
        used.append(runner.graphs)

    monkeypatch.setattr(module.Worker, "init_kv", init_kv)
    assert generate() == wanted
    assert used[0].used > 3
