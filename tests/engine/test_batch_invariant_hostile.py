"""Batch-invariant mode under a hostile library: every declared architecture, however its work is cut.

tests/hostile.py makes torch's roundings follow shapes, places and addresses, as libraries of some machines do. Here the
model runs over paged memory without an engine: all rows in one step, rows alone, small chunks of random rows over other
blocks; every logit must have the same bits. `make invariance` runs the same promise through the engine, on the
libraries that a machine really has: tests/engine/test_invariance.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.base import env
from quire.models.build import build_model
from quire.ops import sample
from quire.ops.cpu import forms
from quire.ops.cpu.native import kernels
from tests.hostile import Hostile
from tests.paged import Paged
from tests.products import KINDS, marked
from tests.tiny_models import ARCHS, VOCAB, tiny_model

LENGTHS = (18, 1, 2)  # more than a tile of attention, and two short ones
# Beside one of each kind, those whose norms, residuals, routers or states are unlike: `make test` takes these in the
# compiled forms, `make long` all. In torch alone, where all arithmetic is torch's and slow to disturb, one of each kind
# is all there is; `make invariance` runs the others.
UNLIKE = (
    "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Glm4ForCausalLM", "CohereForCausalLM", "StableLmForCausalLM",
    "FalconForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM", "MptForCausalLM", "BitNetForCausalLM",
    "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "GraniteMoeForCausalLM",
    "FalconH1ForCausalLM", "Zamba2ForCausalLM", "JambaForCausalLM", "NemotronHForCausalLM", "Mamba2ForCausalLM",
    "OlmoHybridForCausalLM", "Qwen3_5ForCausalLM", "BartForCausalLM",
)  # fmt: skip
COMPILED = [("compiled", arch) for arch in ARCHS]
CASES = [*marked(COMPILED, [("compiled", arch) for arch in (*KINDS, *UNLIKE)]), *(("torch", arch) for arch in KINDS)]


@pytest.fixture
def arithmetic(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    if request.param == "torch":
        monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    if request.param == "compiled":
        if kernels() is None:
            pytest.skip("no compiled kernels")
        forms.register(1)
    yield request.param
    monkeypatch.undo()
    env.forget_all()


def model_of(arch: str, dtype: torch.dtype = torch.float32) -> Any:
    theirs = tiny_model(arch)
    model = build_model(theirs.config.to_dict() | {"architectures": [arch]}, dtype=dtype)
    model.load_weights(theirs.state_dict().items())
    return model


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(n)] for n in LENGTHS]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("arithmetic", "arch"), CASES, indirect=["arithmetic"])
def test_bits_do_not_depend_on_the_library(arch: str, arithmetic: str) -> None:
    model, prompts = model_of(arch), prompts_of(7)
    with Hostile() as library:
        whole = Paged(model, prompts, block_size=4).whole()
        assert same(whole, Paged(model, prompts, block_size=1, seed=1).in_chunks(seed=1)), "small chunks"
        assert same(whole[:1], Paged(model, prompts[:1], block_size=16, seed=2).whole()), "alone"
    assert library.moved or arithmetic == "compiled"


def test_without_the_mode_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if this ever fails, the test above proves nothing."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    model, prompts = model_of("LlamaForCausalLM"), prompts_of(7)
    for operator in ("linear", "cos", "rms_norm", "silu", "scaled_dot_product_attention"):
        with Hostile(frozenset([operator])) as library:
            whole = Paged(model, prompts, block_size=4).whole()
            assert library.moved[operator]
            assert not same(whole, Paged(model, prompts, block_size=1, seed=1).in_chunks(seed=1)), operator
    monkeypatch.undo()
    env.forget_all()


@pytest.mark.parametrize("arithmetic", ["compiled", "torch"], indirect=True)
def test_choices_do_not_depend_on_the_library(arithmetic: str) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    floors, shares, seeds = torch.linspace(0.001, 0.2, 9), torch.linspace(0.3, 0.99, 9), torch.arange(9)

    def chosen(rows: slice) -> list[torch.Tensor]:
        own = logits[rows].clone()
        scores = sample.log_probs.on("cpu")(own)
        sample.min_p_(own, floors[rows])
        sample.top_p_(own, shares[rows])
        kept = own.clone()
        return [scores, kept, sample.sample_(own, seeds[rows], seeds[rows] + 5), own]

    with Hostile():
        together = chosen(slice(0, 9))
        for i in range(9):
            alone = chosen(slice(i, i + 1))
            assert same([part[i : i + 1].float() for part in together], [part.float() for part in alone])
