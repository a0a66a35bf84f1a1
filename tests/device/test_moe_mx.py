"""Experts in MXFP4 by the kernel for Hopper: against their reference, in graphs, and as engines load and run them."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from quire import LLM, SamplingParams
from quire.base import env
from quire.config import EngineArgs
from quire.loader.load import load_model
from quire.ops import act as act_ops
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.coded_experts import ExpertCodes
from quire.ops.mx_experts import MxCodes
from quire.ops.op import Kernels
from quire.ops.triton import act
from quire.ops.triton.warm import cache_dir
from quire.quant.coded_experts import CodedExperts
from tests.coded_expert_cases import as_mx, make_codes
from tests.fused_cases import Draw
from tests.quantized import write_gpt_oss
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.gpu
moe_mx = pytest.importorskip("quire.ops.triton.moe_mx")
LIMIT = 1.5e-2
CLAMPS = {"alpha": 1.702, "limit": 2.0}
SHAPES = [(5, 2, 320, 192), (8, 4, 192, 448), (16, 4, 2880, 320)]  # experts, top_k, dim, ffn
TOKENS = (1, 2, 7, 33, 130, 900)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("compiled for Hopper alone")


def outputs(tokens: int, experts: int, top_k: int, dim: int, ffn: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Results without and twice with early launches, less what they were added to; and what they should be."""
    draw = Draw(tokens, "cuda", torch.bfloat16)
    w1, w2 = make_codes("mxfp4", draw, experts, 2 * ffn, dim), make_codes("mxfp4", draw, experts, dim, ffn)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    b1, b2 = draw.normal(experts, 2 * ffn), draw.normal(experts, dim)
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k)
    first, second = as_mx(w1, gated=True), as_mx(w2, gated=False)
    wanted = ops.run_coded_experts.reference(
        x.float(), weights, index, w1, w2, b1=b1.float(), b2=b2.float(), stream=stream.float(),
        act=partial(act_ops.clamped_swiglu.reference, **CLAMPS),
    )  # fmt: skip
    found = [
        moe_mx.run_experts(
            x, weights, index.int(), first, second, b1=b1, b2=b2, stream=stream, act=(act.CLAMPED, *CLAMPS.values()),
            early=early,
        )
        for early in (False, True, True)
    ]  # fmt: skip
    return [one.float() - stream.float() for one in found], wanted - stream.float()


@pytest.mark.parametrize(("experts", "top_k", "dim", "ffn"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts(tokens: int, experts: int, top_k: int, dim: int, ffn: int) -> None:
    found, wanted = outputs(tokens, experts, top_k, dim, ffn)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0] - wanted).norm() / wanted.norm() < LIMIT


@pytest.mark.parametrize("tokens", [1, 24, 900])
def test_a_captured_graph_serves_any_routing(tokens: int) -> None:
    """Through the forms that a model gets, without biases."""
    kernels = Kernels.here("cuda")
    run, route = kernels.of(ops.run_coded_experts), kernels.of(moe_ops.route)
    draw = Draw(0, "cuda", torch.bfloat16)
    experts, top_k, dim, ffn = 8, 4, 192, 448
    w1, w2 = make_codes("mxfp4", draw, experts, 2 * ffn, dim), make_codes("mxfp4", draw, experts, dim, ffn)
    packed = as_mx(w1, gated=True), as_mx(w2, gated=False)
    x, logits = draw.normal(tokens, dim), draw.normal(tokens, experts, dtype=torch.float32)
    silu = kernels.of(act_ops.gated_of("silu"))

    def layer() -> torch.Tensor:
        return run(x, *route(logits, top_k), *packed, b1=None, b2=None, act=silu)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        again = Draw(seed + 1, "cuda", torch.bfloat16)
        x.copy_(again.normal(tokens, dim))
        logits.copy_(again.normal(tokens, experts, dtype=torch.float32, scale=10.0 if seed else 0.1))
        out.fill_(torch.nan)
        graph.replay()
        weights, index = moe_ops.route(logits, top_k)
        wanted = ops.run_coded_experts.reference(
            x.float(), weights, index, w1, w2, b1=None, b2=None, act=act_ops.GATED["silu"].reference
        )  # fmt: skip
        assert (out.float() - wanted).norm() / wanted.norm() < LIMIT


# --- as an engine has them

SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 8}
COMMON: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "seed": 0}


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (size,), generator=dice).tolist() for size in (3, 9, 40, 17, 2, 80, 33)]


def compiled() -> list[Path]:
    return sorted(Path(cache_dir()).rglob("_mx_kernel.cubin"))


def answers(folder: Path, **options: Any) -> tuple[list[float], list[list[int]], list[type]]:
    """Log probabilities of all prompts' tokens, one prompt at a time and all at once; greedy tokens of each prompt
    alone and all at once; the forms of experts. Nothing is compiled for them once the engine has started."""
    llm = LLM(str(folder), **COMMON, **options)
    at_start = compiled()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    try:
        outs = [out for own in prompts() for out in llm.generate([own], params, use_tqdm=False)]
        outs += llm.generate(prompts(), params, use_tqdm=False)
        assert compiled() == at_start
        numbers = [
            step[token].logprob
            for out in outs
            for step, token in zip(out.prompt_logprobs, out.prompt_token_ids, strict=True)
            if step is not None
        ]
        return numbers, [list(out.outputs[0].token_ids) for out in outs], llm.apply_model(forms)[0]
    finally:
        llm.close()


def forms(model: Any) -> list[type]:
    stored = [module.stored for name, module in model.named_modules() if name.endswith(".experts")]
    sides = [side for one in stored if isinstance(one, CodedExperts) for side in (one.up, one.down)]
    return sorted({type(side.weight()) for side in sides}, key=str)


def test_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs and without, as near to the decoded float32 model as the kernels of other forms in bfloat16, which
    batch-invariant mode has; there every answer is the same alone and in a batch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # which nobody else fills meanwhile
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    env.forget_all()
    write_gpt_oss(tmp_path, **SIZES)
    wanted = torch.tensor(answers(tmp_path, device="cpu", dtype="float32")[0])
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    old, tokens, kinds = answers(tmp_path, dtype="bfloat16")
    half = len(tokens) // 2
    assert kinds == [ExpertCodes] and tokens[:half] == tokens[half:]
    monkeypatch.delenv("QUIRE_BATCH_INVARIANT")
    env.forget_all()
    limit = 1.5 * (torch.tensor(old) - wanted).abs().median() + 1e-3  # where a token's experts change, all may differ
    for options in ({}, {"enforce_eager": True}):
        found, _tokens, kinds = answers(tmp_path, dtype="bfloat16", **options)
        assert kinds == [MxCodes] and compiled()
        assert (torch.tensor(found) - wanted).abs().median() < limit, options


def test_loading(tmp_path: Path) -> None:
    """No two forms of all experts are held, and what was loaded multiplies as its numbers do."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 12, "num_local_experts": 16}
    write_gpt_oss(tmp_path, **sizes)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(
        EngineArgs(model=str(tmp_path), device="cuda", dtype="bfloat16").create_engine_config(), "cuda"
    )  # fmt: skip
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert forms(model) == [MxCodes]
    codes = 12 * 16 * 3 * 256 * 256 * 17 // 32
    assert codes < held < 1.5 * codes and peak - held < codes / 2  # threads work on some layers at once
    draw = Draw(0, "cuda", torch.bfloat16)
    (stored, *_) = [module.stored for name, module in model.named_modules() if name.endswith(".experts")]
    for tokens in (1, 37):
        x = draw.normal(tokens, 256)
        weights, index = moe_ops.route(draw.normal(tokens, 16, dtype=torch.float32), 2)
        found = stored.multiply(x, weights, index)
        wanted = ops.run_coded_experts.reference(
            x.float(), weights, index, stored.up.weight(), stored.down.weight(), b1=stored.b1.float(),
            b2=stored.b2.float(), act=stored.shape.act,
        )  # fmt: skip
        assert (found.float() - wanted).norm() / wanted.norm() < LIMIT
