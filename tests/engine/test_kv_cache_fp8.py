"""A KV cache in fp8 on a CPU, whole: what it holds, where its scales come from, and that tokens do not depend on how a
request was computed. (On a GPU: tests/device/test_kv_quant_gpu.py.)"""

import json
import logging

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.attention.cpu import CpuAttention
from quire.attention.cross import WithCross
from quire.base import env
from quire.checkpoint.quantization import has_fp8_cache
from quire.checkpoint.weight_files import find_weights
from quire.config import EngineArgs
from quire.loader.kv_scales import LayerScales, is_cache_scale, layer_number, read_kv_scales
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from quire.schema.kv import KVKind, KVSpec
from tests.attention_case import RULE_NAMES, RULES, CodedCase
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MIX = [(12, 5), (150, 1), (9, 9), (3, 1), (170, 31), (60, 0), (128, 1), (2, 2), (64, 1)]
SMALL = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "max_model_len": 128, "dtype": "float32"}


def open_tiny(folder, **options):
    return LLM(str(folder), **{**SMALL, "kv_cache_dtype": "fp8", "skip_tokenizer_init": True, **options})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny("LlamaForCausalLM", folder, num_hidden_layers=2)
    return folder


def prompts(count, length=40):
    make = torch.Generator().manual_seed(1)
    return [
        {"prompt_token_ids": torch.randint(3, 90, (length + 7 * i,), generator=make).tolist()} for i in range(count)
    ]


def tokens(llm, given, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(given, params, use_tqdm=False)]


@pytest.mark.parametrize("fixed", [False, True], ids=["free", "batch-invariant"])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_attention_against_rounded_keys_and_values(rule, form, fixed):
    """Float32 arithmetic on both sides, so that only a difference of codes or scales can show."""
    scales = (0.013, 0.37) if form == "float8_e4m3fn" else (0.0007, 0.02)
    case = CodedCase(MIX, heads=4, kv_heads=2, size=32, rule=rule, form=form, scales=scales)
    found, _ = case.run(CpuAttention(fixed=fixed))
    torch.testing.assert_close(found, case.reference(), rtol=2e-5, atol=2e-5)


def test_latent_attention():
    case = CodedCase(MIX, heads=6, kv_heads=1, size=20, value=-12, form="float8_e4m3fn", scales=(0.02, 9.0))
    found, _ = case.run(CpuAttention(fixed=False))
    torch.testing.assert_close(found, case.reference(), rtol=2e-5, atol=2e-5)


def test_a_cache_holds_four_times_as_many_tokens_as_float32(tiny):
    blocks = {}
    for dtype in ("auto", "fp8"):
        llm = open_tiny(tiny, kv_cache_dtype=dtype)
        blocks[dtype] = llm.llm_engine.model_executor.driver_worker.worker.kv_memory.layout.num_blocks
        llm.close()
    assert blocks["fp8"] == 4 * blocks["auto"]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_chunks_prefix_hits_and_neighbours_change_no_token(tiny, kv_cache_dtype, monkeypatch):
    """In batch-invariant mode: whole prompts, chunks of 16 tokens, a second time over cached prefixes, alone."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        whole = open_tiny(tiny, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
        expected = tokens(whole, prompts(3))
        assert [tokens(whole, [prompt])[0] for prompt in prompts(3)] == expected
        whole.close()
        chunked = open_tiny(tiny, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=16, max_num_seqs=4)
        assert tokens(chunked, prompts(3)) == expected
        assert tokens(chunked, prompts(3)) == expected  # from the prefix cache
        chunked.close()
    finally:
        monkeypatch.undo()
        env.forget_all()


def test_preemption_changes_no_token(tiny, monkeypatch):
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        roomy, tight = open_tiny(tiny), open_tiny(tiny, num_gpu_blocks_override=12, max_num_seqs=3)
        given, params = prompts(3), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        expected = tokens(roomy, given, params)
        assert tokens(tight, given, params) == expected
        roomy.close()
        tight.close()
    finally:
        monkeypatch.undo()
        env.forget_all()


# --- where scales come from


NAMES = {
    "on the layer": (("self_attn.k_scale", "self_attn.v_scale"), ()),
    "below attn": (("self_attn.attn.k_scale", "self_attn.attn.v_scale"), ()),
    "on projections": (("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), ()),
    "as output scales": (("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"), ()),
    "one for both": ((), ("self_attn.kv_scale",)),
    "one for both, ModelOpt": ((), ("self_attn.kv_cache_scale",)),
    "one for both, of the fused projection": ((), ("self_attn.qkv_proj.output_scale",)),
}


def with_scales(source, folder, scales, config=None):
    """The tiny model with more tensors, and more in its configuration."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {name: torch.as_tensor(value) for name, value in scales.items()}, folder / "model.safetensors")
    if config:
        whole = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(whole | config))
    return folder


def layer_scales(llm):
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return {layer_number(layer): cache.layer_scales.tolist() for layer, cache in runner.scaled.items()}


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_a_checkpoint_under_any_name(tiny, tmp_path, names):
    pair, both = NAMES[names]
    scales, expected = {}, {}
    for layer in range(2):
        numbers = [0.25 * (layer + 1), 0.5 * (layer + 1)]
        expected[layer] = numbers if pair else numbers[:1] * 2
        scales |= {f"model.layers.{layer}.{name}": value for name, value in zip(pair, numbers, strict=False)}
        scales |= {f"model.layers.{layer}.{name}": numbers[0] for name in both}
    folder = with_scales(tiny, tmp_path / "scaled", scales)
    assert {k: list(v) for k, v in read_kv_scales(find_weights(str(folder))).items()} == expected
    llm = open_tiny(folder)
    try:
        assert layer_scales(llm) == expected
        assert len(tokens(llm, prompts(1))[0]) == 12
    finally:
        llm.close()


def test_scales_change_what_is_computed(tiny, tmp_path):
    """Scales so large that every code is 0 or the smallest: the tokens cannot be the same."""
    names = ("self_attn.k_scale", "self_attn.v_scale")
    folder = with_scales(tiny, tmp_path / "s", {f"model.layers.{i}.{n}": 1e3 for i in range(2) for n in names})
    plain, scaled = open_tiny(tiny), open_tiny(folder)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(llm):
        (output,) = llm.generate(prompts(1), params, use_tqdm=False)
        return [next(iter(near.values())).logprob for near in output.prompt_logprobs[1:]]

    try:
        apart = max(abs(a - b) for a, b in zip(logprobs(plain), logprobs(scaled), strict=True))
        assert apart > 1e-3
    finally:
        plain.close()
        scaled.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor(0.0), "is 0.0; a scale of the KV cache is a number above 0"),
        (torch.tensor(-1.0), "is -1.0; a scale"),
        (torch.tensor(float("nan")), "is nan; a scale"),
        (torch.ones(4), "has 4 numbers"),
    ],
)
def test_scales_that_are_none(tiny, tmp_path, tensor, message):
    folder = with_scales(tiny, tmp_path / "wrong", {"model.layers.1.self_attn.v_scale": tensor})
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(find_weights(str(folder)))


def test_two_names_for_one_scale_must_agree(tiny, tmp_path):
    same = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.kv_scale": 0.5}
    assert read_kv_scales(find_weights(str(with_scales(tiny, tmp_path / "same", same)))) == {0: LayerScales(0.5, 0.5)}
    other = same | {"model.layers.0.self_attn.kv_scale": 0.25}
    with pytest.raises(CheckpointError, match="they are the same scale"):
        read_kv_scales(find_weights(str(with_scales(tiny, tmp_path / "other", other))))


def test_names_that_are_no_scales_of_the_cache():
    assert is_cache_scale("model.layers.0.self_attn.q_scale")
    assert not is_cache_scale("model.layers.0.self_attn.k_proj.weight_scale")
    assert not is_cache_scale("model.layers.0.self_attn.k_proj.input_scale")
    assert layer_number("model.layers.12.self_attn.attn") == 12 and layer_number("attn") == -1


def test_no_scales_is_one_warning(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        llm = open_tiny(tiny)
    try:
        assert layer_scales(llm) == {0: [1.0, 1.0], 1: [1.0, 1.0]}
    finally:
        llm.close()
    assert sum("scales for 0 of 2 layers" in record.getMessage() for record in caplog.records) == 1


def test_the_first_step_measures_scales(tiny):
    """From requests, not from the step that warms up; and only once."""
    llm = open_tiny(tiny, calculate_kv_scales=True)
    try:
        assert layer_scales(llm) == {0: [1.0, 1.0], 1: [1.0, 1.0]}
        tokens(llm, prompts(1))
        first = layer_scales(llm)
        assert all(0 < value < 1 for pair in first.values() for value in pair)
        tokens(llm, prompts(3))
        assert layer_scales(llm) == first
    finally:
        llm.close()


# --- what a configuration says


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"type": "int"}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": 8}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, False),
    ],
)
def test_checkpoints_made_for_an_fp8_cache(settings, expected):
    assert has_fp8_cache({"quantization_config": settings}) is expected
    assert has_fp8_cache({"text_config": {"quantization_config": settings}}) is expected
    assert not has_fp8_cache({"quantization_config": [settings]})


def test_what_options_are_taken(tiny, tmp_path, caplog):
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        config = EngineArgs(model=str(tiny), device="cpu", kv_cache_dtype=name).create_engine_config()
        assert config.cache_config.cache_dtype == name
    for name in ("nvfp4", "fp8_ds_mla", "int4_per_token_head", "fp8_per_token_head"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype.*{name}|{name}.*kv_cache_dtype"):
            EngineArgs(model=str(tiny), device="cpu", kv_cache_dtype=name).create_engine_config()
    with caplog.at_level(logging.WARNING):
        EngineArgs(model=str(tiny), device="cpu", calculate_kv_scales=True).create_engine_config()
    assert any("calculate_kv_scales has no effect" in record.getMessage() for record in caplog.records)


def test_cross_attention_refuses_it():
    backend = WithCross(CpuAttention(fixed=False))
    cross = KVSpec(layer="x", kind=KVKind.CROSS, block_size=16, num_kv_heads=2, head_size=16, dtype="bfloat16")
    assert backend.supports(cross) is None
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        assert "8 bits" in backend.supports(msgspec.structs.replace(cross, dtype=dtype))


def test_scales_are_not_measured_for_a_pooling_model(tiny):
    args = EngineArgs(
        model=str(tiny), device="cpu", kv_cache_dtype="fp8", calculate_kv_scales=True, runner="pooling", convert="embed"
    )
    with pytest.raises(NotBuiltError, match="calculate_kv_scales"):
        args.create_engine_config()
