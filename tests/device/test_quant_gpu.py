"""Quantized checkpoints on a GPU: whole engines against transformers' model of the numbers that a checkpoint
means, with and without graphs, and in batch-invariant mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.base import env
from quire.config import EngineArgs
from quire.layers.stored import matrices_of
from quire.loader.load import load_model
from quire.loader.online import coder_of
from quire.ops.coded import CodedWeight, decode_weight, quantize_rows
from quire.quant.coded import CodedMatrix
from quire.quant.coded_scheme import CodedParts
from tests.cut_model import cut_gguf, open_cut, tokens
from tests.engine.test_coded_weights import KINDS
from tests.engine.test_quantized_formats import FORMS
from tests.quantized import write
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(4, 40)), [300, 7, 7, 25], [9] * 70, list(range(5, 200, 3))]
ONLINE = {"fp8": "fp8", "ptpc_fp8": "fp8", "int8_wo": "int8", "int4_wo": "int4"}  # what is rounded to what


def first_logprobs(folder: Path, count: int = 6, **options: Any) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Tokens of every prompt, and the largest log-probabilities of the first."""
    llm = LLM(str(folder), **{"dtype": "bfloat16", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, **options})
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=5, ignore_eos=True)
    try:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    finally:
        llm.close()
    tokens = [list(out.outputs[0].token_ids) for out in outputs]
    return tokens, [{at: one.logprob for at, one in out.outputs[0].logprobs[0].items()} for out in outputs]


def error_of(logprobs: list[dict[int, float]], exact: list[torch.Tensor]) -> float:
    return max(
        abs(value - row[token].item()) for one, row in zip(logprobs, exact, strict=True) for token, value in one.items()
    )


def exact_logprobs(hf: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [hf(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS]


@contextmanager
def inputs_rounded(hf: nn.Module, weight: CodedWeight, noise: float, seed: int) -> Iterator[None]:
    """As many rows are multiplied with such a weight; `noise` stands for the 16 bits in which a device makes them."""
    draw = torch.Generator().manual_seed(seed)

    def rounded(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].flatten(0, -2)
        x = x * (1 + noise * torch.randn(x.shape, generator=draw))
        group = x.shape[1] if weight.group == weight.width else weight.group
        codes, scale = quantize_rows.reference(x.bfloat16(), weight.codes.dtype, group)
        numbers = codes.float().unflatten(1, (-1, group)) * scale.t()[:, :, None]
        return (numbers.flatten(1).view_as(args[0]),)

    linears = [m for name, m in hf.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    hooks = [module.register_forward_pre_hook(rounded) for module in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def moved_by_rounding(hf: nn.Module, weight: CodedWeight, exact: list[torch.Tensor]) -> float:
    """How far rounded inputs move the largest log-probabilities: as such, and when a last bit of 16 decides which way
    an input is rounded. A tiny random model makes much of it: half a nat and more."""
    moved = []
    for seed, noise in enumerate((0.0, 2**-9, 2**-9)):
        with inputs_rounded(hf, weight, noise, seed):
            moved.append(exact_logprobs(hf))
    pairs = [(exact, moved[0]), *itertools.combinations(moved, 2)]
    return max((x - y)[x.topk(5).indices].abs().max().item() for a, b in pairs for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_checkpoints_of_every_format(name: str, tmp_path: Path) -> None:
    form, _, _ = FORMS[name]
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    config = EngineArgs(model=str(tmp_path), dtype="bfloat16", device="cuda").create_engine_config()
    model = load_model(config, "cuda")
    coded = [p for _, m in matrices_of(model) if isinstance(m, CodedParts) for p in m.coded()]
    assert {p.kind for p in coded} == ({KINDS[name]} if KINDS[name] else set())
    rounding = next((p._replace(codes=p.codes[:1].cpu()) for p in coded if p.rounds), None)
    del model, coded
    eager, found = first_logprobs(tmp_path, enforce_eager=True)
    captured, again = first_logprobs(tmp_path)
    hf.save_pretrained(tmp_path / "numbers")  # what the codes mean, uncoded: its own error is that of 16 bits
    _, plain = first_logprobs(tmp_path / "numbers", skip_tokenizer_init=True)
    exact = exact_logprobs(hf)
    bound = 3 * error_of(plain, exact) + 0.02  # the largest of twenty numbers, once with other roundings to 16 bits
    if rounding is not None:
        bound += 1.5 * moved_by_rounding(hf, rounding, exact)
    assert error_of(found, exact) < bound and error_of(again, exact) < bound
    same = sum(a == b for a, b in zip(eager, captured, strict=True))
    assert same >= len(PROMPTS) - 1  # equal logits of two tokens may go either way


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ONLINE)
def test_rounded_while_loading(how: str, dtype: str, tmp_path: Path) -> None:
    """The numbers of the file are rounded, not what they are in the model's dtype: of 4-bit codes one in 250 would be
    another, which moves this model by 0.6. In float16 the bound is narrow enough to see that."""
    hf = make_tiny("Qwen3ForCausalLM", tmp_path).float()
    _, plain = first_logprobs(tmp_path, dtype=dtype)
    bound = 3 * error_of(plain, exact_logprobs(hf)) + 0.02
    coder = coder_of(ONLINE[how])
    assert coder is not None
    codes = None
    eight = coder_of("int8")
    assert eight is not None
    for name, module in hf.named_modules():
        if isinstance(module, nn.Linear):
            made = (eight if name == "lm_head" else coder)(module.weight.data)
            codes = codes if name == "lm_head" else made
            numbers = made.numbers() if isinstance(made, CodedMatrix) else made
            if isinstance(numbers, CodedWeight):
                numbers = decode_weight.reference(numbers, torch.float32)
            assert not torch.equal(numbers.float(), module.weight.data)
            module.weight.data = numbers.float()
    exact = exact_logprobs(hf)  # of what the rounded weights mean
    if isinstance(codes, CodedWeight) and codes.rounds:
        bound += 1.5 * moved_by_rounding(hf, codes, exact)
    _, found = first_logprobs(tmp_path, quantization=how, dtype=dtype)
    assert error_of(found, exact) < bound


@pytest.mark.parametrize("name", ["ct-w8a8-fp8", "gptq-4-sym", "ct-w8a8-int8"])
def test_batch_invariant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "LlamaForCausalLM", FORMS[name][0], num_hidden_layers=2)
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        llm = LLM(str(tmp_path), dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=64 << 20)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
        try:
            together = llm.generate(PROMPTS * 8, params, use_tqdm=False)[: len(PROMPTS)]
            alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
        finally:
            llm.close()
    finally:
        env.forget_all()
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        mine, theirs = ([next(iter(at.values())).logprob for at in each.outputs[0].logprobs] for each in (one, other))
        assert mine == theirs


def test_memory_while_rounding(tmp_path: Path) -> None:
    """Never the whole model in 16 bits: the peak is what stays, and a matrix in work with its copies."""
    make_tiny("Qwen3ForCausalLM", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    args = EngineArgs(model=str(tmp_path), dtype="bfloat16", device="cuda", quantization="fp8")
    model = load_model(args.create_engine_config(), "cuda")
    stays, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    coded_bytes = sum(p.codes.numel() for _, m in matrices_of(model) if isinstance(m, CodedParts) for p in m.coded())
    largest = 2 * 4096 * 1024 * 4  # gate and up in float32, the widest that rounding makes
    assert stays < coded_bytes * 1.2 + (8 << 20)
    assert peak - stays < 16 * largest  # as many threads as there are may each have one in work
    assert peak < stays + coded_bytes  # and far from 16 bits of everything


def prompt_logprobs(file: Path, device: str) -> torch.Tensor:
    """Of a text's tokens, in float32."""
    llm = open_cut(file, dtype="float32", device=device)
    prompt = tokens(48)
    try:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    finally:
        llm.close()
    return torch.tensor([one[token].logprob for one, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_blocks_of_gguf(kind: str, tmp_path: Path) -> None:
    """Decoded while loading, to the numbers that a CPU decodes them to (tests/loader/test_gguf_types.py). What another
    kind of block means is told apart."""
    file = cut_gguf(tmp_path / f"{kind}.gguf", kind)
    found, wanted = prompt_logprobs(file, "cuda"), prompt_logprobs(file, "cpu")
    assert (found - wanted).abs().max() < 1e-3
    other = prompt_logprobs(cut_gguf(tmp_path / "other.gguf", "Q5_1" if kind == "Q4_0" else "Q4_0"), "cpu")
    assert (found - other).abs().max() > 0.02
