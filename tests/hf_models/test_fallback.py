"""Models through transformers' own code: greedy tokens equal transformers', however the work is cut; else a refusal."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.hf_models.by_row import ByRow
from quire.hf_models.foreign import build_fallback
from quire.hf_models.rehearsal import compare
from quire.hf_models.taps import MaskRule, RefusalError, Taps
from quire.layers.batch import Batch, GivenVectors
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from quire.schema.kv import KVKind
from tests.tiny_models import VOCAB, make_tiny, write_tiny, write_tokenizer

RUNS = [
    {"max_num_batched_tokens": 24, "block_size": 4, "num_gpu_blocks_override": 2000, "async_scheduling": True},
    {"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 15, "max_model_len": 112},
]
# Declared here too: the same checkpoint runs both ways. A window, a soft cap, a sink, experts, latent attention.
DECLARED = ("LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")
SMALL = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
# Of transformers alone: attention of their own, positions that follow from the cache, heads inside a wrapper.
ONLY = {
    "RoFormerForCausalLM": dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, max_position_embeddings=512,
        is_decoder=True, embedding_size=64,
    ),
    "BertGenerationDecoder": dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, max_position_embeddings=512,
        is_decoder=True,
    ),
}  # fmt: skip


def prompts() -> list[list[int]]:
    order = torch.Generator().manual_seed(3)
    stem, *tails = (torch.randint(4, VOCAB, (n,), generator=order).tolist() for n in (40, 1, 2, 19, 33))
    return [stem + tail if i % 2 else tail for i, tail in enumerate(tails)]


def greedy(model, prompt: list[int], given: list[int]) -> list[int]:
    """What transformers alone would have written, token by token, along the given answer."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + given]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def metric(llm: LLM, name: str) -> float:
    return next(one.value for one in llm.get_metrics() if one.name == name)


def check(folder: Path, model, *, windowed: bool = False) -> None:
    """`windowed`: two groups of layers, of which one forgets; that needs more blocks and hardly ever lacks any."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for options in RUNS:
        few = options is RUNS[-1]
        if few and windowed:
            options = {**options, "num_gpu_blocks_override": 32}
        common = dict(dtype="float32", max_model_len=256, model_impl="transformers", disable_log_stats=False)
        llm = LLM(str(folder), **{**common, **options})
        first = [out.outputs[0].token_ids for out in llm.generate(prompts(), params, use_tqdm=False)]
        again = [out.outputs[0].token_ids for out in llm.generate(prompts(), params, use_tqdm=False)]
        if few:
            assert metric(llm, "vllm:num_preemptions") > 0 or windowed
        else:
            assert metric(llm, "vllm:prefix_cache_hits") > 0
        llm.close()
        assert again == first
        for prompt, tokens in zip(prompts(), first, strict=True):
            assert tokens == greedy(model, prompt, tokens)


@pytest.mark.parametrize("arch", DECLARED)
def test_declared_architectures_run_with_transformers_code_too(arch, tmp_path):
    model = make_tiny(arch, tmp_path)
    check(tmp_path, model, windowed=arch in ("Gemma2ForCausalLM", "GptOssForCausalLM"))


def make_only(arch: str, folder: Path, **over):
    torch.manual_seed(0)
    kind = getattr(transformers, arch)
    model = kind(kind.config_class(**SMALL, **{**ONLY[arch], **over})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
        model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize("arch", ["RoFormerForCausalLM", "BertGenerationDecoder"])
def test_architectures_that_only_transformers_has(arch, tmp_path, caplog):
    model = make_only(arch, tmp_path)
    check(tmp_path, model)


def open_fallback(folder: Path, **over):
    raw = json.loads((folder / "config.json").read_text())
    options = dict(dtype=torch.float32, device=torch.device("cpu"), max_model_len=256) | over
    return build_fallback(raw, str(folder), **options)


def test_each_model_takes_the_way_that_fits_it(tmp_path, caplog):
    for arch, way in (("Qwen3ForCausalLM", Taps), ("BloomForCausalLM", ByRow)):
        write_tiny(arch, tmp_path / arch)
        model = open_fallback(tmp_path / arch)
        model.read_folder(str(tmp_path / arch))
        assert isinstance(model._runner, way), arch
        assert model.arch.vocab == VOCAB


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_vectors": GivenVectors(torch.tensor([0]), torch.zeros(1, 64))}, "input embeddings"),
        ({"adapter_index": torch.ones(2, dtype=torch.int32)}, "adapters"),
        ({"position_channels": torch.zeros((3, 2), dtype=torch.int64)}, "channels"),
        ({"encoded": torch.zeros(1, 64)}, "encoder"),
    ],
)
def test_what_transformers_code_is_not_given_is_refused(fields, named, tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    model = open_fallback(tmp_path)
    model.read_folder(str(tmp_path))
    tokens = torch.tensor([3, 4])
    with pytest.raises(NotBuiltError, match=named):
        model.forward(Batch(tokens, torch.arange(2), [], tokens[:0], 2, **fields))


def test_windows_are_read_from_the_rules_of_masks(tmp_path):
    write_tiny("Gemma2ForCausalLM", tmp_path, sliding_window=300)  # longer than any text of the rehearsal
    model = open_fallback(tmp_path)
    model.read_folder(str(tmp_path))
    kinds = [(spec.kind, spec.window) for spec in model.kv_specs(16, "float32")]
    assert kinds == [(KVKind.WINDOW, 300), (KVKind.FULL, 0)] * 2


@pytest.mark.parametrize("arch", ["MambaForCausalLM", "JambaForCausalLM", "Qwen3NextForCausalLM"])
def test_running_states_are_refused(arch, tmp_path):
    write_tiny(arch, tmp_path)
    model = open_fallback(tmp_path)
    with pytest.raises(RefusalError, match=f"{arch} cannot run through transformers' code") as refused:
        model.read_folder(str(tmp_path))
    assert "recurrent state" in str(refused.value) or "no keys and values" in str(refused.value)


def test_a_model_whose_own_code_fails_is_refused(tmp_path):
    """As configurations with numbers that it does not take make it do, when it runs."""
    write_tiny("OPTForCausalLM", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dropout": -0.1}))
    model = open_fallback(tmp_path)
    with pytest.raises(RefusalError, match="fails on a text of its own with ValueError: dropout probability"):
        model.read_folder(str(tmp_path))


def test_the_engine_refuses_states_with_the_reason(tmp_path):
    write_tiny("Lfm2ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="recurrent state"):
        LLM(str(tmp_path), dtype="float32", max_model_len=64, model_impl="transformers")


def test_the_rehearsal_finds_wrong_answers():
    right = [torch.randn(24, 50, generator=torch.Generator().manual_seed(1))]
    compare(right, [right[0] + 1e-5], torch.float32)
    with pytest.raises(RefusalError, match="relative difference"):
        compare(right, [torch.cat((right[0][:23], right[0][:1]))], torch.float32)
    with pytest.raises(RefusalError, match="in a single pass"):
        compare(right, [right[0] * float("nan")], torch.float32)


def test_masks_of_other_kinds_are_refused():
    def causal(b, h, q, k):
        return k <= q

    assert MaskRule(causal, None).keys_seen() == (KVKind.FULL, 0)
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 9), 9).keys_seen() == (KVKind.WINDOW, 9)
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k // 9 == q // 9), 9).keys_seen() == (KVKind.CHUNK, 9)
    for rule in (lambda b, h, q, k: k >= 0, lambda b, h, q, k: (k <= q) & (k > q - 10), lambda b, h, q, k: k < q):
        with pytest.raises(RefusalError, match="neither causal"):
            MaskRule(rule, 9).keys_seen()


def test_auto_says_in_one_line_that_it_falls_back(tmp_path, caplog):
    make_only("RoFormerForCausalLM", tmp_path)
    with caplog.at_level(logging.INFO, logger="quire"):
        llm = LLM(str(tmp_path), dtype="float32", max_model_len=64)
    llm.close()
    lines = [record.message for record in caplog.records if record.name == "quire.models.choose"]
    assert lines == ["model code: transformers' (no declaration for RoFormerForCausalLM)"]


def test_quire_alone_refuses_what_is_not_declared(tmp_path):
    make_only("RoFormerForCausalLM", tmp_path)
    for impl in ("quire", "vllm"):
        with pytest.raises(ConfigError, match=r"RoFormerForCausalLM.*is not declared"):
            LLM(str(tmp_path), dtype="float32", max_model_len=64, model_impl=impl)
    with pytest.raises(ConfigError, match="model_impl"):
        LLM(str(tmp_path), model_impl="tensorflow")


def test_dummy_weights_and_bfloat16(tmp_path):
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    for options in ({"load_format": "dummy"}, {"dtype": "bfloat16"}):
        llm = LLM(str(tmp_path), **{"dtype": "float32", "max_model_len": 64, "model_impl": "transformers"} | options)
        out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert len(out[0].outputs[0].token_ids) == 5
        llm.close()


def test_files_that_do_not_fit_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    write_tiny("LlamaForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.extra.weight"] = torch.ones(2)
    save_file(tensors, file, metadata={"format": "pt"})
    model = open_fallback(tmp_path)
    with pytest.raises(CheckpointError) as wrong:
        model.read_folder(str(tmp_path))
    assert "layers.1.mlp.up_proj.weight" in str(wrong.value) and "layers.2.extra.weight" in str(wrong.value)


def test_prompt_logprobs_come_from_the_same_head(tmp_path):
    model = make_tiny("GraniteForCausalLM", tmp_path)  # its logits are divided after the head
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=128, model_impl="transformers", max_num_batched_tokens=7)
    prompt = prompts()[1][:20]
    out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2), use_tqdm=False)[0]
    llm.close()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for at, entries in enumerate(out.prompt_logprobs[1:]):
        for token, entry in entries.items():
            assert abs(entry.logprob - wanted[at, token].item()) < 1e-3
