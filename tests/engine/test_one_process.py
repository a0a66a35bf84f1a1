"""What a model runs follows from the machine, the environment and its options, never from what else its process has
built: forms of ops are the same before and after a worker, and two models keep what each was built with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops.cpu.native import kernels
from quire.ops.linear import linear
from quire.ops.moe import Mixture, run_experts, run_mixture
from tests.replaced_form import replaced
from tests.tiny_models import write_tiny

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11, 80, 21, 6, 45]}, {"prompt_token_ids": [5, 6]}]
BEFORE_AND_AFTER = """
from quire.ops import act, linear, moe, norm, packed, sample
from quire.ops.op import Op

def chosen():
    rooms = (act, linear, moe, norm, packed, sample)
    ops = {f"{room.__name__}.{name}": op for room in rooms for name, op in vars(room).items() if isinstance(op, Op)}
    return {name: op.on("cpu").__qualname__ if hasattr(op.on("cpu"), "__qualname__") else repr(op.on("cpu").func)
            for name, op in ops.items()}

before = chosen()
from quire import LLM
LLM(%r, device="cpu", max_model_len=64, skip_tokenizer_init=True, num_gpu_blocks_override=40).close()
after = chosen()
assert before == after, {name: (before[name], after[name]) for name in before if before[name] != after[name]}
print(len(before), any("native" in name for name in after.values()))
"""


@pytest.mark.parametrize("changes", [{}, {"QUIRE_CPU_KERNELS": "off"}], ids=["own", "off"])
def test_a_worker_changes_no_choice(tmp_path: Path, changes: dict[str, str]) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    program = [sys.executable, "-c", BEFORE_AND_AFTER % str(tmp_path)]
    changes = {"QUIRE_ENABLE_V1_MULTIPROCESSING": "0", **changes}
    done = subprocess.run(program, env=env.child_environment(changes), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    count, compiled = done.stdout.split()
    assert int(count) > 20 and compiled == str("QUIRE_CPU_KERNELS" not in changes and kernels() is not None)


def set_mode(patch: pytest.MonkeyPatch, same_bits: bool) -> None:
    patch.setenv("QUIRE_BATCH_INVARIANT", str(int(same_bits)))
    env.forget_all()


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), device="cpu", max_model_len=64, skip_tokenizer_init=True, num_gpu_blocks_override=40, **options
    )


@needs_kernels
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("LlamaForCausalLM", {"dtype": "float32"}),
        ("LlamaForCausalLM", {"quantization": "int8_wo"}),
        ("Qwen3MoeForCausalLM", {"dtype": "bfloat16"}),
        ("Gemma3ForCausalLM", {"dtype": "bfloat16"}),
    ],
)
def test_each_engine_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, Any]
) -> None:
    """An engine computes what it was built to compute, whatever engines of another mode were built since."""
    write_tiny(arch, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)

    def answers(llm: LLM) -> list[list[tuple[int, float]]]:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [[(t, entry.logprob) for step in one.outputs[0].logprobs for t, entry in step.items()] for one in found]

    engines = []
    for same_bits in (True, False):
        set_mode(monkeypatch, same_bits)
        llm = opened(tmp_path, enable_prefix_caching=False, **options)
        engines.append((answers(llm), llm))
    try:
        for wanted, llm in (*engines, *engines):
            assert answers(llm) == wanted
    finally:
        for _, llm in engines:
            llm.close()


@needs_kernels
def test_an_engine_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are taken again long after a model was built, when another engine is to run without kernels."""
    write_tiny("LlamaForCausalLM", tmp_path)

    def answers(llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, use_tqdm=False)]

    def model_of(llm: LLM) -> Any:
        return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    with opened(tmp_path, quantization="int8_wo") as llm:
        wanted = answers(llm)
        monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
        env.forget_all()
        with opened(tmp_path, dtype="float32") as other:
            assert not any(stretch._wholes for stretch in model_of(other)._stretches) and answers(other)
        model_of(llm).finish_weights()
        assert answers(llm) == wanted


def test_experts_keep_the_product_they_were_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    seen: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(x.shape[0])
        return linear.reference(x, weight, bias)

    with replaced(linear, "cpu", counted):
        run, mix = run_experts.on("cpu"), run_mixture.on("cpu")
    x, w1, w2 = torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    weights, index = torch.ones(3, 1), torch.tensor([[0], [1], [0]])
    act: Callable[[torch.Tensor], torch.Tensor] = lambda h: h[:, :4]  # noqa: E731
    run(x, weights, index, w1, w2, b1=None, b2=None, act=act)
    assert seen == [2, 2, 1, 1]
    none = (None, None)
    mix(x, weights, index, Mixture(tuple(w1), tuple(w2), none, none, act))
    assert seen == [2, 2, 1, 1] * 2
