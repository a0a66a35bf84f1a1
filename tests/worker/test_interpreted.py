"""The GPU worker's step on CPU, with the attention kernels under Triton's interpreter: a real model, the captured
decode step uncaptured, and the tokens of the plain CPU worker."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base import env
from quire.worker import runner as runner_module
from tests.tiny_models import VOCAB, write_tiny
from tests.worker.test_staged import UncapturedGraphs

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")
OPTIONS = {
    "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 8,
    "max_num_batched_tokens": 24, "max_num_seqs": 4, "device": "cpu", "async_scheduling": True,
}  # fmt: skip


def use_gpu_steps(monkeypatch: pytest.MonkeyPatch) -> list[UncapturedGraphs]:
    """Workers that are made from here on take steps as on a GPU; their graphs."""
    from quire.attention.cross import WithPagedCross
    from quire.attention.state import WithStates
    from quire.attention.triton import TritonAttention
    from quire.worker import worker as module
    from quire.worker.capture import Capturer
    from quire.worker.device_inputs import DeviceInputs, GraphFields

    def _select(*_: object) -> WithPagedCross:
        return WithPagedCross(WithStates(TritonAttention()))

    used: list[UncapturedGraphs] = []
    plain = module.Worker.init_kv

    def init_kv(self: module.Worker, layout: object) -> None:
        self._parts = dataclasses.replace(self._parts, select_backend=_select)
        plain(self, layout)
        runner = self.model_runner
        runner.inputs = DeviceInputs(runner.rows, 64, GraphFields(encoders=runner.rows.has_cross))
        capturer = Capturer(torch.device("cpu"))
        runner.graphs = UncapturedGraphs(
            (1, 2, 4), runner.model, runner.backend, runner.inputs, runner.sampler.plain, capturer, max_context=64
        )
        used.append(runner.graphs)

    monkeypatch.setattr(module.Worker, "init_kv", init_kv)
    return used


@pytest.mark.parametrize(
    "arch",
    [
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "DeepseekV3ForCausalLM",
        "Qwen3NextForCausalLM",
        "GptOssForCausalLM",
        "Gemma3nForCausalLM",
    ],
)
def test_tokens_equal_the_cpu_workers(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(arch, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in (3, 20, 9, 31)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5, ignore_eos=True) for i in range(4)]

    def generate() -> list[list[int]]:
        llm = LLM(str(tmp_path), **OPTIONS)
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.close()
        return found

    wanted = generate()
    used = use_gpu_steps(monkeypatch)
    assert generate() == wanted
    assert used[0].used > 3


def states_and_tokens(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each step without a graph from here on: how many final states and tokens it has. Few sampled tokens are
    enough to compute their states alone."""
    found: list[tuple[int, int]] = []
    plain = runner_module.ModelRunner._choose

    def choose(self: runner_module.ModelRunner, flight: object, hidden: torch.Tensor, *rest: object) -> None:
        found.append((len(hidden), int(flight.shape.ends[-1])))  # type: ignore[attr-defined]
        plain(self, flight, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "FEW_ROWS", 0)
    monkeypatch.setattr(runner_module.ModelRunner, "_choose", choose)
    return found


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "Gemma2ForCausalLM"])
def test_the_last_layer_computes_sampled_tokens_alone(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts are long enough; but all of them, if someone asks for log probabilities of prompts."""
    write_tiny(arch, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in (3, 20, 9, 31)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5, ignore_eos=True) for i in range(4)]
    asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)

    def generate() -> tuple[list[list[int]], list[float]]:
        llm = LLM(str(tmp_path), **OPTIONS)
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
        (of_prompt,) = llm.generate(prompts[1:2], asked, use_tqdm=False)
        llm.close()
        assert of_prompt.prompt_logprobs is not None
        ranked = [next(iter(entry.values())).logprob for entry in of_prompt.prompt_logprobs if entry]
        return found, ranked

    wanted, ranked = generate()
    use_gpu_steps(monkeypatch)
    lengths = states_and_tokens(monkeypatch)
    found, again = generate()
    assert found == wanted
    assert again == pytest.approx(ranked, abs=2e-3)
    assert any(states < tokens for states, tokens in lengths) and (20, 20) in lengths


@pytest.mark.parametrize("invariant", [False, True])
def test_the_last_layer_computes_all_tokens_in_batch_invariant_mode(
    invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where, without it, the same step computes fewer."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", str(int(invariant)))
    env.forget_all()
    write_tiny("LlamaForCausalLM", tmp_path)
    use_gpu_steps(monkeypatch)
    lengths = states_and_tokens(monkeypatch)
    llm = LLM(str(tmp_path), **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([[5, 6, 7, 8], [9, 10, 11]], params, use_tqdm=False)
    llm.close()
    assert lengths[-1] == (7 if invariant else 2, 7)


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Molmo2ForConditionalGeneration"])
def test_images_that_attend_in_both_directions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to itself, or to the others too; beside transformers."""
    from tests.media_models import IMAGE, draw_item, is_greedy, make_model, prompt_of

    model = make_model(name, tmp_path)
    a, b = (draw_item(name, model, seed) for seed in (1, 2))
    rng = random.Random(1)
    before, after = ([rng.randrange(4, IMAGE) for _ in range(count)] for count in (3, 5))
    pieces = [[before, a, after], [after, b, before, a, [7]], [after + before]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={IMAGE: -100.0})
    use_gpu_steps(monkeypatch)
    with LLM(str(tmp_path), **{**OPTIONS, "max_num_batched_tokens": 48}) as llm:
        outputs = llm.generate([prompt_of(one) for one in pieces], params, use_tqdm=False)
    for one, output in zip(pieces, outputs, strict=True):
        assert is_greedy(name, model, one, list(output.outputs[0].token_ids))


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_encoder_decoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-attention over pages, and T5's learned distances, in prompts and captured decodes, beside transformers."""
    from tests.seq2seq_models import FAMILIES, draw_text, greedy, make_model

    model = make_model(name, tmp_path)
    given = [draw_text(1, 19), draw_text(2, 3), draw_text(3, 1)]
    begin = [FAMILIES[name]["decoder_start_token_id"], *draw_text(9, 6)]
    used = use_gpu_steps(monkeypatch)
    with LLM(str(tmp_path), **{**OPTIONS, "num_gpu_blocks_override": 80}) as llm:
        prompts = [
            {"encoder_prompt": {"prompt_token_ids": one}, "decoder_prompt": {"prompt_token_ids": begin[: 7 - 3 * i]}}
            for i, one in enumerate(given)
        ]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    for i, (one, output) in enumerate(zip(given, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == greedy(model, one, begin[: 7 - 3 * i], 4).tokens
    assert used[0].used > 1
