"""An engine with adapters computes what transformers computes with merged weights, for every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.layers.linear import Linear
from tests.tiny_adapters import TinyAdapter, expert_modules, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny

PROMPT = [5, 9, 77, 100, 41, 8, 250, 33, 12]
NUM_TOKENS = 6
# architecture -> last names of the modules that are adapted; None: every matmul but the head
CASES: dict[str, tuple[str, ...] | None] = {
    "LlamaForCausalLM": None,
    "Qwen2ForCausalLM": ("q_proj", "v_proj"),
    "Qwen3ForCausalLM": None,
    "Gemma2ForCausalLM": None,
    "Gemma3ForCausalLM": ("k_proj", "o_proj", "gate_proj"),
    "Phi3ForCausalLM": None,  # qkv_proj and gate_up_proj are stored as one
    "GPTNeoXForCausalLM": None,  # query_key_value, head by head
    "GPT2LMHeadModel": None,  # transposed
    "FalconForCausalLM": None,
    "OlmoeForCausalLM": ("q_proj", "gate"),
    "DeepseekV3ForCausalLM": None,  # latent attention: kv_b_proj is absorbed
    "Qwen3NextForCausalLM": None,  # gated attention, delta rule, mixture with a shared expert
    "FalconH1ForCausalLM": None,  # state and attention side by side, factors folded into the weights
}


def start(folder: Path, **more: Any) -> LLM:
    options: dict[str, Any] = dict(
        dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=64, seed=0,
        kv_cache_memory_bytes=1 << 24,
    )  # fmt: skip
    return LLM(str(folder), **(options | more))


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].float(), -1)


def check_like_merged(llm: LLM, model: Any, adapters: list[TinyAdapter], *, close: float = 2e-4) -> None:
    """One batch of the base model and every adapter: tokens, and log probabilities of every position."""
    loras = [None, *[LoRARequest(f"a{i}", i + 1, one.path) for i, one in enumerate(adapters)]]
    models = [model, *[merge(model, one) for one in adapters]]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts: Any = [{"prompt_token_ids": PROMPT}] * len(loras)
    answers = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    texts = set()
    for lora, expected, answer in zip(loras, models, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        texts.add(tuple(tokens))
        assert tokens == greedy(expected, PROMPT, NUM_TOKENS), lora
        assert answer.lora_request is lora
        everything = PROMPT + tokens
        scores = log_probabilities(expected, everything)
        rows = [*(answer.prompt_logprobs or [])[1:], *(answer.outputs[0].logprobs or [])]
        assert len(rows) == len(everything) - 1
        for position, row in enumerate(rows):
            token = everything[position + 1]
            assert row is not None and abs(row[token].logprob - float(scores[position, token])) < close, (
                lora,
                position,
            )
    assert len(texts) > 1, "the adapters change nothing: the test cannot fail"


@pytest.mark.parametrize("arch", CASES)
def test_adapters_are_merged_weights(arch: str, tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    targets = CASES[arch]
    adapters = [
        write_adapter(model, tmp_path / "a1", targets=targets, rank=4, seed=1),
        write_adapter(model, tmp_path / "a2", targets=targets, rank=8, seed=2, rslora=True, as_bin=True),
    ]
    assert len(adapters[0].parts) >= 4
    check_like_merged(start(tmp_path / "model"), model, adapters)


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_adapters_of_single_experts(arch: str, tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    modules = expert_modules(model, (0, 1, 3))
    assert modules
    everything = linear_modules(model, ("q_proj", "o_proj")) | modules
    adapters = [
        write_adapter(model, tmp_path / "a1", modules=modules, seed=1),
        write_adapter(model, tmp_path / "a2", modules=everything, seed=2, rank=8),
    ]
    check_like_merged(start(tmp_path / "model"), model, adapters)


def hooked(llm: LLM, adapter: TinyAdapter) -> None:
    """Let the model of an engine without adapters add B A x itself, after each of its matmuls."""

    def install(model: Any) -> None:
        for layer in [module for module in model.modules() if isinstance(module, Linear)]:
            at = 0
            for part, rows in layer.parts.items():
                if (low := adapter.parts.get(layer.prefix + part)) is not None:
                    layer.register_forward_hook(adding(low, at, at + rows))
                at += rows

    llm.apply_model(install)


def adding(low: Any, start: int, stop: int) -> Any:
    def add(layer: Any, args: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        y[:, start:stop] += low.scale * (args[0].float() @ low.a.t() @ low.b.t()).to(y.dtype)
        return y

    return add


_ROUNDING = 0.1  # packed kernels round the inputs of a matmul, which magnifies differences in the last bits
QUANTIZED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "w4a16": ("Qwen3ForCausalLM", {"quantization": "int4_wo"}),
    "w8a16": ("LlamaForCausalLM", {"quantization": "int8_wo"}),
    "gguf": (None, {}),  # the embedded model
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_adapters_of_packed_bases(name: str, tmp_path: Path) -> None:
    """The base stays packed; what an adapter adds is added to what it computes."""
    arch, options = QUANTIZED[name]
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "seed": 0, "dtype": "float32", **options}
    model: Any = None
    if arch is not None:
        make_tiny(arch, tmp_path / "model", hidden_size=128, intermediate_size=256)
        model = str(tmp_path / "model")
    plain = LLM(model, **options)
    sizes: dict[str, tuple[int, int]] = {}

    def measure(module: Any) -> None:
        for layer in module.modules():
            if isinstance(layer, Linear) and ".layers." in layer.prefix:
                sizes.update({layer.prefix + part: (rows, layer.in_size) for part, rows in layer.parts.items()})

    plain.apply_model(measure)
    assert len(sizes) >= 28
    adapter = write_adapter(torch.nn.Module(), tmp_path / "adapter", modules=sizes, rank=8, strength=0.1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt: Any = {"prompt_token_ids": PROMPT}
    base = scores_of(plain.generate(prompt, params, use_tqdm=False)[0])
    hooked(plain, adapter)
    expected = scores_of(plain.generate(prompt, params, use_tqdm=False)[0])
    plain.close()
    adapted = LLM(model, **options, enable_lora=True, max_lora_rank=8)
    lora = LoRARequest("a", 1, adapter.path)
    answers = adapted.generate([prompt, prompt], params, lora_request=[lora, None], use_tqdm=False)
    for answer, scores in zip(answers, (expected, base), strict=True):
        differences = [abs(mine - theirs) for mine, theirs in zip(scores_of(answer), scores, strict=True)]
        assert max(differences) < _ROUNDING, differences
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 5 * _ROUNDING
    adapted.close()


def scores_of(answer: Any) -> list[float]:
    """Log probabilities of the prompt's tokens."""
    return [row[token].logprob for token, row in zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)]
