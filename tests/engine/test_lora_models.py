"""An engine with adapters computes what transformers computes with merged weights, for every kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.base import native
from quire.layers.linear import Linear
from quire.schema.errors import InputError
from tests.cut_model import cut_folder, cut_gguf
from tests.engine.lora_answers import PROMPT, check_like_merged, log_probabilities, start
from tests.engine.test_quantized_formats import FORMS
from tests.quantized import write
from tests.tiny_adapters import (
    TinyAdapter,
    expert_modules,
    linear_modules,
    merge,
    stacked_parameters,
    write_adapter,
    write_folder,
    write_stacked,
)
from tests.tiny_models import make_tiny, write_tiny

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
    "MambaForCausalLM": None,  # in_proj, x_proj, dt_proj
    "Mamba2ForCausalLM": None,
    "JambaForCausalLM": None,
    "Lfm2ForCausalLM": None,  # short convolutions
    "Gemma3nForCausalLM": None,  # streams, keys and values of other layers
}


def test_adapters_of_layers_that_borrow_keys_and_values(tmp_path: Path) -> None:
    """PEFT writes pairs for projections that Gemma 3n has and does not read: they change nothing. Those of a layer that
    the model does not have are refused still."""
    model = make_tiny("Gemma3nForCausalLM", tmp_path / "model")
    modules = linear_modules(model, ("q_proj", "k_proj", "v_proj"))
    count, shared = model.config.num_hidden_layers, model.config.num_kv_shared_layers
    assert shared
    shapes = {name: modules[f"model.layers.0.self_attn.{name}"] for name in ("k_proj", "v_proj")}
    borrowed = {
        f"model.layers.{index}.self_attn.{name}": shape
        for index in range(count - shared, count) for name, shape in shapes.items()
    }  # fmt: skip
    plain = {name: shape for name, shape in modules.items() if name not in borrowed}
    few = write_adapter(model, tmp_path / "few", modules=plain, seed=3)
    tensors = load_file(f"{few.path}/adapter_model.safetensors")
    for name, (rows, width) in borrowed.items():
        stem = f"base_model.model.{name}.lora_"
        tensors |= {f"{stem}A.weight": torch.randn(4, width), f"{stem}B.weight": torch.randn(rows, 4)}
    about = json.loads(Path(few.path, "adapter_config.json").read_text())
    write_folder(tmp_path / "all", tensors, about)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with start(tmp_path / "model") as llm:
        said = [
            llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, lora_request=adapter, use_tqdm=False)
            for adapter in (None, LoRARequest("few", 1, few.path), LoRARequest("all", 2, str(tmp_path / "all")))
        ]
        base, some, every = (output.outputs[0].token_ids for (output,) in said)
        assert some == every != base
        far = {
            name.replace(".0.", f".{count}."): tensor.clone()
            for name, tensor in tensors.items()
            if ".layers.0." in name
        }
        write_folder(tmp_path / "far", tensors | far, about)
        with pytest.raises(Exception, match=f"layers.{count}"):
            llm.generate([{"prompt_token_ids": [5]}], params, lora_request=LoRARequest("far", 3, str(tmp_path / "far")))


@pytest.mark.parametrize("arch", CASES)
def test_adapters_are_merged_weights(arch: str, tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    targets = CASES[arch]
    adapters = [
        write_adapter(model, tmp_path / "a1", targets=targets, rank=4, seed=1),
        write_adapter(model, tmp_path / "a2", targets=targets, rank=8, seed=2, rslora=True, as_bin=True),
    ]
    assert len(adapters[0].parts) >= 4
    with start(tmp_path / "model") as llm:
        check_like_merged(llm, model, adapters)


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
    with start(tmp_path / "model") as llm:
        check_like_merged(llm, model, adapters)


def ends_of(model: Any) -> tuple[str, str]:
    """Names of the embedding and of the head."""
    wanted = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(wanted[0])], names[id(wanted[1])]


ENDS = {
    "LlamaForCausalLM": False,
    "Gemma3ForCausalLM": True,  # vectors are scaled
    "GPT2LMHeadModel": True,
    "GPTNeoXForCausalLM": False,  # embed_in, embed_out
    "FalconH1ForCausalLM": False,  # factors of both
    "CohereForCausalLM": True,  # logits are scaled
}


@pytest.mark.parametrize("arch", ENDS)
def test_adapters_of_the_embedding_and_the_head(arch: str, tmp_path: Path) -> None:
    """Each alone, both together, and with another layer: where they share a matrix, adapters do not."""
    model = make_tiny(arch, tmp_path / "model")
    embedding, head = ends_of(model)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == ENDS[arch]
    inner = sorted(linear_modules(model, None))[0]
    groups = [(embedding,), (head,), (embedding, head, inner)]
    sizes = linear_modules(model, [name.rpartition(".")[2] for name in (embedding, head, inner)])
    adapters = [
        write_adapter(model, tmp_path / f"a{seed}", modules={name: sizes[name] for name in names}, seed=seed)
        for seed, names in enumerate(groups)
    ]
    with start(tmp_path / "model", max_loras=3) as llm:
        check_like_merged(llm, model, adapters, different=4)


# architecture -> the parameters of its stacked experts in the order of the module, and their axes in a PEFT of today
STACKED: dict[str, tuple[tuple[str, ...], str]] = {
    "Qwen3MoeForCausalLM": (("gate_up_proj", "down_proj"), "e o i"),
    "MixtralForCausalLM": (("gate_up_proj", "down_proj"), "e o i"),
    "GptOssForCausalLM": (("gate_up_proj", "down_proj"), "e i o"),  # rows of gate and up alternate
    "Llama4ForCausalLM": (("gate_up_proj", "down_proj"), "e o i"),  # weights multiply what goes into an expert
    "DeepseekV3ForCausalLM": (("gate_up_proj", "down_proj"), "e o i"),
    "GraniteMoeForCausalLM": (("gate_up_proj", "down_proj"), "e o i"),
    "NemotronHForCausalLM": (("up_proj", "down_proj"), "e o i"),  # no gate
}


SIZES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"intermediate_size": 80},
    "Llama4ForCausalLM": {"num_experts_per_tok": 2},  # two rows of a mixture for each of the step
}


@pytest.mark.parametrize("arch", STACKED)
def test_adapters_of_stacked_experts(arch: str, tmp_path: Path) -> None:
    leaves, axes = STACKED[arch]
    model = make_tiny(arch, tmp_path / "model", **SIZES.get(arch, {}))
    options: dict[str, Any] = {"axes": axes, "config": {"peft_version": "0.21.2"}}
    adapters = [
        write_stacked(model, tmp_path / "both", leaves=leaves, seed=1, **options),
        write_stacked(model, tmp_path / "down", leaves=leaves[1:], seed=2, rank=8, **options),
        write_stacked(model, tmp_path / "up", leaves=leaves[:1], seed=3, rank=2, **options),
    ]
    assert all(one.parts for one in adapters)
    with start(tmp_path / "model", max_loras=3) as llm:
        check_like_merged(llm, model, adapters, different=4)


def test_both_forms_of_experts_in_one_batch(tmp_path: Path) -> None:
    model = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    single = write_adapter(model, tmp_path / "single", modules=expert_modules(model, (0, 2)), seed=1)
    stacked = write_stacked(model, tmp_path / "stacked", seed=2, config={"peft_version": "0.21.2"})
    with start(tmp_path / "model", enable_mixed_moe_lora_format=True) as llm:
        check_like_merged(llm, model, [single, stacked], different=3)


def test_stacked_experts_of_other_versions(tmp_path: Path) -> None:
    """A was that of the output once, where experts are stored as [experts, out, in]."""
    model = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    assert {tuple(p.shape) for p in stacked_parameters(model).values()} == {(4, 64, 64), (4, 64, 32)}, "one is square"
    old = write_stacked(model, tmp_path / "old", axes="e i o", seed=1)  # the shape of down tells
    alone = {"leaves": ("gate_up_proj",), "seed": 2}
    older = write_stacked(model, tmp_path / "older", axes="e i o", config={"peft_version": "0.18.1"}, **alone)  # type: ignore[arg-type]
    newer = write_stacked(model, tmp_path / "newer", axes="e o i", config={"peft_version": "0.19.1"}, **alone)  # type: ignore[arg-type]
    unknown = write_stacked(model, tmp_path / "unknown", **alone)  # type: ignore[arg-type]
    with start(tmp_path / "model", max_loras=3) as llm:
        check_like_merged(llm, model, [old, older, newer], different=4)
        with pytest.raises(InputError, match="without peft_version"):
            llm.add_lora(LoRARequest("unknown", 9, unknown.path))


def test_stacked_experts_that_are_modules(tmp_path: Path) -> None:
    """Granite's checkpoints call them input_linear and output_linear, with weights of three axes."""
    model = make_tiny("GraniteMoeForCausalLM", tmp_path / "model")
    adapter = write_stacked(model, tmp_path / "a", leaves=("gate_up_proj",), config={"peft_version": "0.21.2"})
    file, config = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    tensors = load_file(file)
    assert any(".experts.lora_A" in name for name in tensors)
    save_file({name.replace(".experts.", ".input_linear."): tensor for name, tensor in tensors.items()}, file)
    changed = {"target_parameters": ["block_sparse_moe.input_linear.weight"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    with start(tmp_path / "model") as llm:
        check_like_merged(llm, model, [adapter])


@pytest.mark.parametrize("name", ["ct-w4a16", "awq", "gptq-4-sym", "fp8-tensor-static", "bnb-nf4"])
def test_adapters_of_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """The judge has the numbers that the checkpoint means, merged with the adapter; the base stays as it is."""
    model = write(tmp_path / "model", "LlamaForCausalLM", FORMS[name][0])
    everything = linear_modules(model, None) | linear_modules(model, ("embed_tokens", "lm_head"))
    adapters = [
        write_adapter(model, tmp_path / "a1", modules=everything, seed=1),
        write_adapter(model, tmp_path / "a2", targets=("q_proj", "down_proj"), rank=8, seed=2),
    ]
    with start(tmp_path / "model") as llm:
        check_like_merged(llm, model, adapters, close=1e-3, different=3)


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_adapters_of_gguf_files(kind: str | None, tmp_path: Path) -> None:
    """The judge has the numbers that the blocks mean (None: Q4_1), merged with the adapter. Blocks are decoded; then,
    by default, multiplied as they are stored: kernels round inputs, and adapters add no error of another size."""
    file = cut_gguf(tmp_path / "model.gguf", kind)
    model = transformers.LlamaForCausalLM.from_pretrained(cut_folder(tmp_path / "decoded", file)).eval()
    ends = linear_modules(model, ("embed_tokens", "lm_head"))
    adapters = [
        write_adapter(model, tmp_path / "a1", rank=4, seed=1, strength=0.05),
        write_adapter(model, tmp_path / "a2", modules=linear_modules(model, ("q_proj",)) | ends, seed=2, strength=0.02),
    ]
    with start(file, skip_tokenizer_init=True) as llm:
        assert llm.model_config.weight_form == "plain"
        check_like_merged(llm, model, adapters, close=1e-3, different=3)
    if native.library() is None:
        return
    with start(file, skip_tokenizer_init=True, dtype="auto") as llm:
        assert llm.model_config.weight_form == "stored"
        loras = [None, *(LoRARequest(f"a{i}", i, one.path) for i, one in enumerate(adapters, 1))]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompts: Any = [{"prompt_token_ids": PROMPT}] * 3
        answers = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    errors = []
    for answer, judge in zip(answers, (model, *(merge(model, one) for one in adapters)), strict=True):
        expected = log_probabilities(judge, PROMPT)
        scores = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
        errors.append(max(abs(ours - theirs) for ours, theirs in zip(scores_of(answer), scores, strict=True)))
    assert errors[0] < 0.5 and max(errors[1:]) < 2 * errors[0] + _ROUNDING, errors


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
    "gguf": (None, {"dtype": "auto", "lora_dtype": "float32"}),  # the embedded model, as it is stored
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_adapters_of_packed_bases(name: str, tmp_path: Path) -> None:
    """The base stays packed; what an adapter adds is added to what it computes."""
    arch, options = QUANTIZED[name]
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "seed": 0, "dtype": "float32", **options}
    model: Any = None
    if arch is not None:
        write_tiny(arch, tmp_path / "model", hidden_size=128, intermediate_size=256)
        model = str(tmp_path / "model")
    plain = LLM(model, **{key: value for key, value in options.items() if key != "lora_dtype"})
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
