"""GGUF files on a GPU: kernels over blocks of every type against their references, and whole engines against the
float32 logits of the numbers that a file means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.base import env
from quire.config import EngineArgs
from quire.layers.stored import matrices_of
from quire.loader.load import load_model
from quire.ops import coded as ops
from quire.ops.act import GATED
from quire.ops.coded import CodedWeight
from quire.ops.triton import act, coded, coded_blocks
from quire.quant.coded_scheme import CodedParts
from tests.coded_cases import check, normal
from tests.few_block_cases import FEW_BLOCKS
from tests.gguf_blocks import TYPES, weight_of, write_model

pytestmark = pytest.mark.gpu
ERROR = 1e-2  # of bfloat16: numbers are rounded three times, results once
PROMPTS = [list(range(4, 40)), [300, 7, 7, 25], [9] * 100, list(range(5, 300, 1))]
SILU = act.gated_form(act.SILU, False)


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return normal(rows, width, seed=rows, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", TYPES)
def test_matmuls(name: str) -> None:
    linear, fixed = coded.CodedLinear(), coded.CodedLinear(fixed=True)
    weight = weight_of(name, 200, 768, "cuda")
    bias = normal(200, seed=1, dtype=torch.bfloat16, device="cuda")
    for count, dtype in ((1, torch.bfloat16), (33, torch.float16), (300, torch.bfloat16)):
        x = inputs(count, 768, dtype)
        wanted = ops.coded_linear.reference(x, weight, bias.to(dtype))
        check(linear(x, weight, bias.to(dtype)), wanted, ERROR)
        if dtype is torch.bfloat16:
            check(fixed(x, weight, bias), wanted, ERROR)
    wanted = ops.decode_weight.reference(weight, torch.bfloat16)
    torch.testing.assert_close(coded.decode_weight(weight, torch.bfloat16), wanted, rtol=2**-7, atol=1e-6)
    index = torch.tensor([[3, 199], [0, 3]], device="cuda")
    found = coded_blocks.decode_rows(weight, index, torch.bfloat16)
    torch.testing.assert_close(found, wanted[index], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_matmuls_of_some_rows_on_hopper(name: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")
    blocks = pytest.importorskip("quire.ops.triton.skinny_blocks")
    weight = weight_of(name, 208, 1024, "cuda")
    if name in ("TQ1_0", "TQ2_0"):
        pytest.skip("kept in a form that other formats have too")
    assert weight.is_blocked and weight.scale.dtype is not torch.float32
    assert blocks.fits_weight(weight)
    for count, dtype in ((1, torch.bfloat16), (17, torch.float16), (64, torch.bfloat16), (200, torch.bfloat16)):
        x, bias = inputs(count, 1024, dtype), normal(208, seed=2, dtype=dtype, device="cuda")
        wanted = ops.coded_linear.reference(x, weight, bias)
        if count in (1, 200):
            check(blocks.linear_parts(x, weight, bias, processors=132, early=True).whole(), wanted, ERROR)
        elif count == 17:
            check(blocks.linear(x, weight, bias, processors=1), wanted, ERROR)
            for key, value in weight.tensors().items():  # every tensor counts
                wrong = weight._replace(**{key: value.roll(1, 1 if value.ndim == 3 else 0)})
                with pytest.raises(AssertionError):
                    check(blocks.linear(x, wrong, bias, processors=1), wanted, ERROR)
        else:
            check(blocks.linear_silu(x, weight, bias, early=True), GATED["silu"].reference(wanted), ERROR)


def logprobs(file: Path, **options: object) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of every prompt, and the log-probabilities of the last prompt's own tokens, and of the first token after
    each."""
    common = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}
    llm = LLM(str(file), **(common | options))
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=5, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    finally:
        llm.close()
    tokens = [list(out.outputs[0].token_ids) for out in outputs]
    numbers = [
        one[token].logprob
        for out, prompt in zip(outputs, PROMPTS, strict=True)
        for one, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    return tokens, torch.tensor(numbers)


@pytest.mark.parametrize("name", TYPES)
def test_engines(name: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", name)
    config = EngineArgs(model=str(file), device="cuda", skip_tokenizer_init=True).create_engine_config()
    assert config.model_config.weight_form == "stored" and config.model_config.dtype == "bfloat16"
    model = load_model(config, "cuda")
    parts = [p for _, m in matrices_of(model) if isinstance(m, CodedParts) for p in m.parts.values()]
    assert len(parts) == 10 and all(isinstance(part, CodedWeight) for part in parts)
    del model, parts
    _, exact = logprobs(file, device="cpu", dtype="float32")
    _, decoded = logprobs(file, device="cuda", dtype="float32")
    assert (decoded - exact).abs().max() < 1e-3
    # NVFP4's random model spreads its logits over twice the range, and bfloat16 alone moves them further than 0.03
    rounding = (logprobs(file, device="cpu", dtype="bfloat16")[1] - exact).abs()
    mean, most = max(0.03, 2 * rounding.mean().item()), max(0.3, 2 * rounding.max().item())
    _, eager = logprobs(file, device="cuda", enforce_eager=True)
    _, graphs = logprobs(file, device="cuda")
    for found in (eager, graphs):
        off = (found - exact).abs()
        assert off.mean() < mean and off.max() < most, (off.mean(), mean, off.max(), most)


def test_files_of_several_types(tmp_path: Path) -> None:
    """As people publish them: values and down projections of another type, a head of its own."""
    table = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q8_0"}
    file = write_model(tmp_path / "model.gguf", table, tied=False)
    _, exact = logprobs(file, device="cpu", dtype="float32")
    for options in ({}, {"dtype": "float16"}):
        _, found = logprobs(file, device="cuda", **options)
        assert (found - exact).abs().mean() < 0.03


def alone(file: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Of a prompt by itself, whose decodes have one row: tokens, and their log-probabilities."""
    llm = LLM(str(file), max_model_len=512, kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)
    try:
        (found,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    finally:
        llm.close()
    (out,) = found.outputs
    return list(out.token_ids), [next(iter(at.values())).logprob for at in out.logprobs]


@pytest.mark.parametrize("table", [*({"": name} for name in FEW_BLOCKS), {"": "Q4_K", "attn_v": "Q6_K"}], ids=str)
def test_decodes_of_one_row(table: dict[str, str], tmp_path: Path) -> None:
    """By the kernels for one row: what the CPU in float32 says of the same tokens; and the same after another start."""
    file, prompt = write_model(tmp_path / "model.gguf", table), PROMPTS[0]
    tokens, found = alone(file, prompt)
    assert alone(file, prompt) == (tokens, found)
    exact = LLM(str(file), device="cpu", dtype="float32", max_model_len=512, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    try:
        (out,) = exact.generate([{"prompt_token_ids": prompt + tokens}], params, use_tqdm=False)
    finally:
        exact.close()
    told = out.prompt_logprobs[len(prompt) :]
    off = [abs(one - at[token].logprob) for one, at, token in zip(found, told, tokens, strict=True)]
    assert sum(off) / len(off) < 0.05 and max(off) < 0.3, off


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_batch_invariant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", name)
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        llm = LLM(str(file), max_model_len=512, kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        try:
            together = llm.generate(prompts * 8, params, use_tqdm=False)[: len(PROMPTS)]
            alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        finally:
            llm.close()
    finally:
        env.forget_all()
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        mine, theirs = ([next(iter(at.values())).logprob for at in each.outputs[0].logprobs] for each in (one, other))
        assert mine == theirs


def test_memory(tmp_path: Path) -> None:
    """What stays is codes and scales."""
    file = write_model(tmp_path / "model.gguf", "Q4_K")
    before = torch.cuda.memory_allocated()
    config = EngineArgs(model=str(file), device="cuda", skip_tokenizer_init=True).create_engine_config()
    model = load_model(config, "cuda")
    stays = torch.cuda.memory_allocated() - before
    sizes = {p.data_ptr(): p.numel() * p.element_size() for _, m in matrices_of(model) for _, p in m.parameters()}
    whole = sum(m.shape.rows * m.shape.width.count * 2 for _, m in matrices_of(model))
    assert sum(sizes.values()) <= stays < sum(sizes.values()) + (512 << 10) < whole
