"""Adapters that PEFT writes itself, and what PEFT computes with them: names, layouts and factors are its own.

tests/engine/test_lora_models.py compares with merged weights and needs no PEFT; here its formula is checked too.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.lora_answers import PROMPT, check_like, start
from tests.tiny_adapters import TinyAdapter, linear_modules, merge, write_adapter, write_stacked
from tests.tiny_models import make_tiny, tiny_model

LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
BOTH_ENDS: dict[str, Any] = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", LINEAR),
    "rslora": ("Qwen3ForCausalLM", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "patterns": (
        "Qwen2ForCausalLM",
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}},
    ),
    "fused": ("Phi3ForCausalLM", LINEAR),
    "head by head": ("GPTNeoXForCausalLM", LINEAR),
    "transposed": ("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "both ends": ("LlamaForCausalLM", BOTH_ENDS),
    "tied, the embedding": ("Gemma3ForCausalLM", {"target_modules": ["embed_tokens"]}),
    "tied, the head": ("Gemma3ForCausalLM", {"target_modules": ["lm_head"]}),
    "tied, as one": ("Gemma3ForCausalLM", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "experts": ("Qwen3MoeForCausalLM", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "some experts": ("MixtralForCausalLM", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "transposed experts": ("GptOssForCausalLM", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "weighted inputs": (
        "Llama4ForCausalLM",
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "latent attention": ("DeepseekV3ForCausalLM", LINEAR | {"target_parameters": EXPERTS}),
    "delta rule": ("Qwen3NextForCausalLM", LINEAR),
    "states": ("Mamba2ForCausalLM", {"target_modules": ["in_proj"]}),
    "states and attention": ("FalconH1ForCausalLM", {"target_modules": ["in_proj", "q_proj", "gate_proj"]}),
}


@pytest.fixture(scope="module")
def peft() -> Any:
    """Imported by the process that runs this file, and by no other that collects it: it takes seconds."""
    return pytest.importorskip("peft")


def wrapped(peft: Any, arch: str, folder: Path, options: dict[str, Any]) -> Any:
    """PEFT around the model, with an adapter of random numbers, which is written to the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(arch)
        config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=True, **options)
        made = peft.get_peft_model(model, config).eval()
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    size = parameter.shape[-1] ** -0.5 if "lora_A" in name else 0.3
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * size)
        made.save_pretrained(str(folder))
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_peft_writes_and_computes(name: str, peft: Any, tmp_path: Path) -> None:
    arch, options = CASES[name]
    base = make_tiny(arch, tmp_path / "model")
    expected = wrapped(peft, arch, tmp_path / "adapter", options)
    with start(tmp_path / "model") as llm:
        check_like(llm, [base, expected], [str(tmp_path / "adapter")])


def test_the_formula_of_merged_weights(peft: Any, tmp_path: Path) -> None:
    """That of tests/tiny_adapters.py is what PEFT computes with the same files."""

    def check(arch: str, adapter: TinyAdapter) -> None:
        merged = merge(tiny_model(arch), adapter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(tiny_model(arch), adapter.path).eval()
        with torch.no_grad():
            ours, theirs = (one(torch.tensor([PROMPT]), use_cache=False).logits for one in (merged, loaded))
            base = tiny_model(arch)(torch.tensor([PROMPT]), use_cache=False).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (ours - base).abs().max() > 0.1, "the adapter changes nothing"

    llama, mixture = tiny_model("LlamaForCausalLM"), tiny_model("Qwen3MoeForCausalLM")
    ends = linear_modules(llama, ("embed_tokens", "lm_head", "q_proj"))
    check("LlamaForCausalLM", write_adapter(llama, tmp_path / "plain", rslora=True))
    check("LlamaForCausalLM", write_adapter(llama, tmp_path / "ends", modules=ends))
    check("Qwen3MoeForCausalLM", write_stacked(mixture, tmp_path / "experts"))
