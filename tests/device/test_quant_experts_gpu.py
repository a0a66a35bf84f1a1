"""Experts in 8 and 4 bits on a GPU: kernels against their reference, and whole engines against decoded weights."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.loader.load import load_model
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.act import GATED
from quire.ops.triton import act, moe, moe_bytes, moe_coded
from tests import coded_expert_cases as cases
from tests.fused_cases import Draw
from tests.quantized import Form, awq, compressed, gptq, nvfp4_modelopt, packed_ints, small_floats, write, write_gpt_oss
from tests.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
SILU = act.gated_form(act.SILU)
CODES = {SILU: act.SILU}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 37, 400])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_kernels(kind: str, tokens: int, dtype: torch.dtype) -> None:
    cases.check_coded("cuda", dtype, kind, tokens, 16, 4, 384, 192)
    cases.check_coded("cuda", dtype, kind, tokens, 5, 2, 360, 200, bias=True)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_kernels_of_many_tokens(kind: str) -> None:
    cases.check_coded("cuda", torch.bfloat16, kind, 3000, 8, 2, 512, 256, bias=True)
    cases.check_coded("cuda", torch.bfloat16, kind, 2, 8, 2, 512, 256, early=True)


@pytest.mark.parametrize("tokens", [5, 60, 1500])
@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks", "fp8-narrow-blocks"])
def test_inputs_in_8_bits(kind: str, tokens: int) -> None:
    cases.check_coded("cuda", torch.bfloat16, kind, tokens, 8, 2, 512, 256, bias=True, round_from=0)
    cases.check_coded("cuda", torch.bfloat16, kind, tokens, 5, 2, 360, 200, round_from=0)


@pytest.mark.parametrize("tokens", [2, 150, 300, 1200, 5000])
@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks"])
def test_bytes_by_bytes(kind: str, tokens: int) -> None:
    """Every tile that moe_bytes.py chooses, after early launches and without."""
    used = moe_bytes.configs_of(4 * tokens, *(cases.make_codes(kind, Draw(0, "cuda"), 32, 256, 256),) * 2)
    how: dict[str, Any] = {"byte_configs": used, "round_from": 0, "acts": 1}
    cases.check_coded("cuda", torch.bfloat16, kind, tokens, 32, 4, 512, 256, early=True, **how)
    cases.check_coded("cuda", torch.float16, kind, tokens, 32, 4, 512, 384, bias=True, **how)


@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks"])
def test_tokens_that_all_choose_the_same_experts(kind: str) -> None:
    """Of 64 experts, two have all pairs."""
    draw = Draw(0, "cuda", torch.bfloat16)
    w1, w2 = cases.make_codes(kind, draw, 64, 2 * 256, 512), cases.make_codes(kind, draw, 64, 512, 256)
    for tokens in (7, 130, 3001):
        x, weights = draw.normal(tokens, 512), draw.normal(tokens, 2, dtype=torch.float32)
        index = torch.tensor([[61, 5]], device="cuda", dtype=torch.int32).expand(tokens, 2)
        found = moe_coded.run_experts(
            x, weights, index, w1, w2, b1=None, b2=None, act=SILU, codes=CODES
        )  # fmt: skip
        wanted = ops.run_coded_experts.reference(
            x.float(), weights, index.long(), w1, w2, b1=None, b2=None, act=GATED["silu"].reference
        )  # fmt: skip
        assert (found.float() - wanted).norm() / wanted.norm() < cases.ROUNDED_LIMIT


def test_rounded_rows() -> None:
    cases.check_rounded("cuda", torch.bfloat16, 1 / 15.9, 1 / 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_row_alone_has_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    draw = Draw(0, "cuda", dtype)
    w1, w2 = cases.make_codes(kind, draw, 8, 2 * 192, 384), cases.make_codes(kind, draw, 8, 384, 192)
    x = draw.normal(600, 384)
    weights, index = moe_ops.route(draw.normal(600, 8, dtype=torch.float32), 2)

    def run(first: int, count: int) -> torch.Tensor:
        some = slice(first, first + count)
        return moe_coded.run_experts(
            x[some], weights[some], index[some], w1, w2, b1=None, b2=None, act=SILU, codes=CODES, fixed=True
        )  # fmt: skip

    whole = run(0, 600)
    for first, count in ((0, 1), (7, 1), (599, 1), (3, 4), (100, 65), (11, 300)):
        assert torch.equal(run(first, count), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("tokens", [1, 24, 900])
@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks", "mxfp4", "int4-128-zeros"])
def test_a_captured_graph_serves_any_routing(kind: str, tokens: int) -> None:
    draw = Draw(0, "cuda", torch.bfloat16)
    experts, top_k, dim, ffn = 8, 4, 256, 128
    w1, w2 = cases.make_codes(kind, draw, experts, 2 * ffn, dim), cases.make_codes(kind, draw, experts, dim, ffn)
    x, logits = draw.normal(tokens, dim), draw.normal(tokens, experts, dtype=torch.float32)

    def layer() -> torch.Tensor:
        weights, index = moe.route(logits, top_k)
        return moe_coded.run_experts(x, weights, index, w1, w2, b1=None, b2=None, act=SILU, codes=CODES)

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
            x.float(), weights, index, w1, w2, b1=None, b2=None, act=GATED["silu"].reference
        )  # fmt: skip
        limit = cases.ROUNDED_LIMIT if kind.startswith("fp8") and tokens > moe.FEW_TOKENS else 1.5e-2
        assert (out.float() - wanted).norm() / wanted.norm() < limit


COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "seed": 0}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": False}
FORMS = {
    "fp8-rows": Form(FP8, small_floats(1, 0, E4M3, "weight_scale")),
    "fp8-blocks": Form(
        {**FP8, "weight_block_size": [128, 128]}, small_floats(128, 128, E4M3, "weight_scale_inv")
    ),
    "gptq": gptq(4, 32, True),
    "awq": awq(32),
    "ct-w4a16": compressed("pack-quantized", packed_ints(4, 32, False), INT4),
    "nvfp4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
}  # fmt: skip
CHECKPOINTS = [
    ("Qwen3MoeForCausalLM", "fp8-rows"), ("Qwen3MoeForCausalLM", "fp8-blocks"), ("Qwen3MoeForCausalLM", "gptq"),
    ("MixtralForCausalLM", "awq"), ("DeepseekV3ForCausalLM", "fp8-blocks"), ("DeepseekV3ForCausalLM", "ct-w4a16"),
    ("Qwen3MoeForCausalLM", "nvfp4"), ("GptOssForCausalLM", "mxfp4"),
]  # fmt: skip


def make(folder: Path, arch: str, name: str) -> str:
    """A checkpoint; the name of its format."""
    if name == "mxfp4":
        write_gpt_oss(folder)
        return "mxfp4"
    form = FORMS[name]
    if arch == "MixtralForCausalLM":  # whose matrices have other names
        form = replace(form, matrices=r"experts\.\d+\.\w+\.weight$")
    write(folder, arch, form)
    return str(FORMS[name].config["quant_method"])


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (size,), generator=dice).tolist() for size in (1, 3, 9, 40, 17, 2)]


def logprobs_of(folder: Path, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and the log probability of each."""
    llm = LLM(str(folder), **{**COMMON, **options})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    try:
        outs = [out.outputs[0] for out in llm.generate(prompts(), params, use_tqdm=False)]
        tokens = [list(out.token_ids) for out in outs]
        numbers = [
            [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)] for out in outs
        ]  # fmt: skip
        return tokens, numbers
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("arch", "name"), CHECKPOINTS, ids=[f"{a.removesuffix('ForCausalLM')}-{n}" for a, n in CHECKPOINTS]
)
def test_engines_agree_with_decoded_weights(arch: str, name: str, tmp_path: Path) -> None:
    """In float32; on a CPU all is decoded. With graphs and without."""
    method = make(tmp_path, arch, name)
    wanted, numbers = logprobs_of(tmp_path, device="cpu")
    for options in ({}, {"enforce_eager": True}):
        found, mine = logprobs_of(tmp_path, device="cuda", quantization=method, **options)
        assert found == wanted
        for a, b in zip(mine, numbers, strict=True):
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-3


def config_of(folder: Path, **options: Any) -> Any:
    return EngineArgs(model=str(folder), device="cuda", **options).create_engine_config()


def stored_in(model: Any) -> list[Any]:
    return [module.stored for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize(
    ("arch", "name"), CHECKPOINTS, ids=[f"{a.removesuffix('ForCausalLM')}-{n}" for a, n in CHECKPOINTS]
)
def test_codes_stay_codes(arch: str, name: str, tmp_path: Path) -> None:
    make(tmp_path, arch, name)
    config = config_of(tmp_path, dtype="bfloat16")
    assert config.model_config.weight_form == "stored"
    found = stored_in(load_model(config, "cuda"))
    assert found
    for stored in found:
        for side in (stored.up, stored.down):
            assert isinstance(side.weight(), ops.ExpertCodes) and side.weight().codes.is_cuda
            assert side.weight().codes.dtype in (torch.uint8, E4M3)


def test_rounding_to_fp8_while_loading(tmp_path: Path) -> None:
    """The peak is that of the result and a few matrices; results are near those of the plain model."""
    experts, size, layers = 128, 256, 2
    sizes = {"num_experts": experts, "moe_intermediate_size": size, "hidden_size": size, "num_hidden_layers": layers}
    make_tiny("Qwen3MoeForCausalLM", tmp_path, **sizes)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(config_of(tmp_path, dtype="bfloat16", quantization="fp8"), "cuda")
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    codes = sum(side.weight().codes.numel() for stored in stored_in(model) for side in (stored.up, stored.down))
    assert codes == layers * experts * 3 * size * size
    assert (
        held < codes * 1.2 and peak - held < codes / 2
    )  # threads work on some at once; 16 bits would take as much again
    plain = load_model(config_of(tmp_path, dtype="bfloat16"), "cuda")
    dice = Draw(0, "cuda", torch.bfloat16)
    x, logits = dice.normal(50, size), dice.normal(50, experts, dtype=torch.float32)
    for mine, wanted in zip(stored_in(model), stored_in(plain), strict=True):
        weights, index = moe_ops.route(logits, 2)
        found, meant = mine.multiply(x, weights, index), wanted.multiply(x, weights, index)
        assert (found - meant).norm() / meant.norm() < 0.08  # weights and inputs of both matmuls


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("GptOssForCausalLM", {"quant_method": "mxfp4"}),
        ("Qwen3MoeForCausalLM", {**FP8, "weight_block_size": [128, 128]}),
        ("Qwen3MoeForCausalLM", FP8),
        ("Qwen3MoeForCausalLM", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    ],
)
def test_dummy_weights_are_codes(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_tiny(arch, tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": settings}))
    config = config_of(tmp_path, dtype="bfloat16", load_format="dummy")
    for stored in stored_in(load_model(config, "cuda")):
        assert isinstance(stored.up.weight(), ops.ExpertCodes) and isinstance(stored.down.weight(), ops.ExpertCodes)
    llm = LLM(str(tmp_path), **{**COMMON, "dtype": "bfloat16"}, device="cuda", load_format="dummy")
    try:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outs = llm.generate(prompts(), params, use_tqdm=False)
        assert all(len(out.outputs[0].token_ids) == 4 for out in outs)
    finally:
        llm.close()
