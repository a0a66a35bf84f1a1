"""Files of quantized checkpoints: in any order and number, wrong in every way, and never in memory twice."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.base import env
from quire.checkpoint.quantization import read_quantization
from quire.checkpoint.weight_files import find_weights
from quire.config import EngineArgs
from quire.loader.coded_stage import CodedStage
from quire.loader.files import WeightPiece, read_directory, read_metadata
from quire.loader.formats.parts import TensorAbout
from quire.loader.load import load_model
from quire.ops.cpu.native import kernels
from quire.quant.coded import AffineCodes, FloatCodes, Grid
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from tests.engine.test_quantized_formats import FORMS, QUARK_MX4, error_to
from tests.exporters import ao_float8, ao_int4, ao_integers, ao_tiles, hqq
from tests.quantized import (
    Form,
    awq,
    compressed,
    gptq,
    packed_ints,
    save_again,
    small_floats,
    static,
    stream,
    write,
    write_files,
)
from tests.tiny_models import write_tiny

GPTQ = gptq(4, 32, True)
FP8 = Form({"quant_method": "fp8"}, small_floats(1, 0, torch.float8_e4m3fn, "weight_scale"))
BLOCKS = Form(
    {"quant_method": "fp8", "weight_block_size": [32, 32]},
    small_floats(32, 32, torch.float8_e4m3fn, "weight_scale_inv"),
)
STATIC = Form(
    {"quant_method": "fp8", "activation_scheme": "static"},
    static(small_floats(0, 0, torch.float8_e4m3fn, "weight_scale", shape=())),
)
HQQ = hqq(4, 32, complete=True)
AO8, AO4, TILES, AO_FP8 = ao_integers(8, 32, False), ao_int4(32), ao_tiles(32), ao_float8(16, 32)
AO3 = ao_integers(3, 32, False)
MX4, MX6, QUARK4 = FORMS["quark-mxfp4"][0], FORMS["quark-mxfp6-e3m2"][0], FORMS["quark-int4"][0]
QUARK_STATIC, QUARK8 = FORMS["quark-fp8-tensor-static"][0], FORMS["quark-int8-rows"][0]
PACKED = compressed("pack-quantized", packed_ints(4, 32, False), {"num_bits": 4, "type": "int"})
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
    env.forget_all()
    yield
    env.forget_all()


def load(folder, **options):
    options = {"dtype": "float32", **options}
    return load_model(EngineArgs(model=str(folder), device="cpu", **options).create_engine_config(), "cpu")


def stage_of(folder, form):
    about = read_quantization({"quantization_config": form.config})
    files = find_weights(str(folder))
    return CodedStage(read_directory(files), about, read_metadata(files))


def parameters(model):
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("form", [GPTQ, PACKED, FP8, AO4], ids=["gptq", "compressed", "fp8", "torchao"])
@pytest.mark.parametrize("eager", [False, True])
def test_tensors_of_a_matrix_in_any_file_and_order(tmp_path, form, eager):
    write_files(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        about = file.metadata()
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])  # by role, so that no matrix is in one file
    for at in range(3):
        part = {name: tensors[name] for name in reversed(names[at::3])}
        some = {key: about[key] for key in list(about)[at::3]}  # metadata too is that of all files
        save_file(part, tmp_path / f"model-{at + 1:05}-of-00003.safetensors", metadata=some)
    how = {"safetensors_load_strategy": "eager"} if eager else {}
    assert same(parameters(load(tmp_path, **how)), wanted)


def test_torch_files(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same(parameters(load(tmp_path)), wanted)


@pytest.mark.parametrize(
    ("name", "form", "by"),
    [
        ("quark-fp8-tensor-static", "fp8", "static"),
        ("quark-fp8-rows", "fp8", "token"),
        ("quark-fp8-blocks", "none", "none"),
        ("quark-int8-rows", "int8", "tensor"),
        ("quark-mxfp4", "fp4", "group"),
        ("ao-fp8", "none", "none"),
        ("ao-fp8-fp8-rows", "fp8", "token"),
        ("ao-fp8-fp8-tensor", "fp8", "tensor"),
        ("ao-fp8-blocks", "fp8", "group"),
        ("ao-int8", "none", "none"),
        ("ao-int8-int8", "int8", "token"),
        ("ao-int4", "none", "none"),
        ("hqq-4", "none", "none"),
    ],
)
def test_how_inputs_are_to_be_rounded(tmp_path, name, form, by):
    write_files(tmp_path, "LlamaForCausalLM", FORMS[name][0], num_hidden_layers=1)
    stage = stage_of(tmp_path, FORMS[name][0])
    tensors = load_file(tmp_path / "model.safetensors")
    pieces = stage.pass_on(WeightPiece(1, lambda name=name: [(name, tensors[name])]) for name in tensors)
    made = {name: one for piece in pieces for name, one in piece.read()}
    inputs = made[f"{DOWN}.weight"].inputs
    assert (inputs.form, inputs.scaled_by) == (form, by) and (inputs.scale is not None) == (by == "static")


def test_quark_with_several_schemes(tmp_path):
    """Down projections in MXFP4, others in fp8 with static inputs: which one a matrix has, its tensors say."""
    static_fp8, mx4 = FORMS["quark-fp8-tensor-static"][0], FORMS["quark-mxfp4"][0]
    inputs = {**QUARK_MX4, "is_dynamic": True}
    layers = {"*.down_proj": {"weight": QUARK_MX4, "input_tensors": inputs}, "model.nowhere": {"weight": QUARK_MX4}}
    both = Form(
        {**static_fp8.config, "layer_quant_config": layers},
        lambda weight: (mx4 if weight.shape == (64, 96) else static_fp8).write(weight),
    )
    hf = write(tmp_path, "LlamaForCausalLM", both, num_hidden_layers=2)
    assert error_to(load(tmp_path), hf) < 1e-4
    made = {plan.module: set(plan.names) for plan in stage_of(tmp_path, both).plans}
    assert made[DOWN] == {"weight", "weight_scale"} and "input_scale" in made["model.layers.0.mlp.up_proj"]


def test_a_matrix_goes_on_as_soon_as_it_is_complete(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    stage = stage_of(tmp_path, GPTQ)
    order = [*sorted(name for name in tensors if DOWN in name), "model.norm.weight"]
    pieces = stage.pass_on(WeightPiece(1, lambda name=name: [(name, tensors[name])]) for name in order)
    made = [[name for name, _ in piece.read()] for piece in pieces]
    assert made == [[], [], [], [f"{DOWN}.weight"], ["model.norm.weight"]]
    stage.check_done()
    list(next(iter(stage.pass_on([WeightPiece(1, lambda: [(order[0], tensors[order[0]])])]))).read())
    with pytest.raises(CheckpointError, match=r"3 tensors of coded matrices did not come: .*down_proj"):
        stage.check_done()


def test_what_the_gpu_will_want_is_there(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", STATIC, num_hidden_layers=2)
    made = {}
    stage = stage_of(tmp_path, STATIC)
    tensors = load_file(tmp_path / "model.safetensors")
    for piece in stage.pass_on(WeightPiece(1, lambda name=name: [(name, tensors[name])]) for name in tensors):
        made |= dict(piece.read())
    coded = made[f"{DOWN}.weight"]
    assert isinstance(coded, FloatCodes) and coded.kind == "e4m3" and coded.codes.dtype == torch.float8_e4m3fn
    assert (coded.inputs.form, coded.inputs.scaled_by, coded.inputs.scale.item()) == ("fp8", "static", 0.25)
    assert f"{DOWN}.input_scale" not in made and isinstance(made["model.norm.weight"], torch.Tensor)


@pytest.mark.parametrize(
    ("form", "ending", "change", "words"),
    [
        (GPTQ, "scales", None, r"'model.layers.0.mlp.down_proj' has .* but no scales: it is missing"),
        (GPTQ, "qzeros", None, "no qzeros"),
        (GPTQ, "qweight", None, "no qweight"),
        (GPTQ, "scales", lambda t: t[:2].clone(), r"96 columns in groups of 32 have 3 scales"),
        (GPTQ, "scales", lambda t: t[:, :8].clone(), r"expected \[3, 64\]"),
        (GPTQ, "qzeros", lambda t: t[:, :4].clone(), r"expected \[3, 8\]"),
        (GPTQ, "g_idx", lambda t: t[:8].clone(), r"expected \[96\]"),
        (GPTQ, "g_idx", lambda t: t + 7, r"names groups 7 to 9; there are 0 to 2"),
        (GPTQ, "qweight", lambda t: t[0].clone(), "expected a matrix"),
        (GPTQ, "qweight", lambda t: t.float(), r"is float32 .*expected int32"),
        (GPTQ, "qweight", lambda t: t[:0].clone(), "expected a matrix that is not empty"),
        (awq(32), "qzeros", None, "no qzeros"),
        (awq(32), "scales", lambda t: t[:, :8].clone(), r"expected \[3, 64\]"),
        (FP8, "weight_scale", None, "no weight_scale"),
        (FP8, "weight_scale", lambda t: t[:5].clone(), r"the scales of .* \[64, 96\] are one, one for each row"),
        (FP8, "weight_scale", lambda t: t * float("nan"), "scales that are not finite"),
        (FP8, "weight", lambda t: t.float(), "but is not coded"),
        (BLOCKS, "weight_scale_inv", lambda t: t[:1].clone(), "or one for each block of 32 x 32"),
        (STATIC, "input_scale", None, "no input_scale"),
        (PACKED, "weight_shape", None, "no weight_shape"),
        (PACKED, "weight_shape", lambda t: t * 2, "do not hold a matrix of"),
        (PACKED, "weight_scale", lambda t: t[:, :2].clone(), "weight_zero_point"),
        (PACKED, "weight_zero_point", lambda t: t[:1].clone(), "expected 4 bits for each of the scales"),
        (HQQ, "W_q", None, "no W_q"),
        (HQQ, "zero", None, "no zero"),
        (HQQ, "shape", None, "no shape"),
        (HQQ, "W_q", lambda t: t[:7].clone(), r"192 x 32 codes of 4 bits are uint8 \[96, 32\]"),
        (HQQ, "W_q", lambda t: t.to(torch.int32), r"is int32 .*codes of 4 bits are uint8"),
        (HQQ, "scale", lambda t: t[:7].clone(), r"expected \[7, 1\], as its scales"),
        (HQQ, "zero", lambda t: t * float("inf"), "not finite"),
        (HQQ, "shape", lambda t: t * 0, r"says \[0, 0\]"),
        (HQQ, "shape", lambda t: t.flip(0), r"\[96, 64\]"),
        (HQQ, "group_size", lambda t: t + 8, "says 40, which does not divide the 96 columns"),
        (HQQ, "group_size", lambda t: t * 0, "says 0; expected 1 to"),
        (HQQ, "group_size", lambda t: t // 2, "codes of 4 bits are uint8"),
        (HQQ, "axis", lambda t: t + 1, "says 2; expected 0 to 1"),
        (HQQ, "nbits", lambda t: t - 1, "says 3, but its packing is 4bit_u8"),
        (hqq(3, 32), "W_q", lambda t: torch.zeros(len(t), 63).half(), "codes of 3 bits are int32"),
        (HQQ, "packing", lambda t: t + 1, "known are 8bit_u8, 4bit_u8"),
        (HQQ, "packing", lambda t: t.repeat(10), "at most 64 bytes"),
        (AO8, "_weight_qdata", None, "no qdata"),
        (AO8, "_weight_scale", None, "no scale"),
        (AO8, "_weight_zero_point", None, "no zero_point"),
        (AO8, "_weight_scale", lambda t: t[:, :2].clone(), r"expected \[64, 3\]: \[64, 96\] in blocks of \[1, 32\]"),
        (AO8, "_weight_zero_point", lambda t: t[:5].clone(), r"expected \[64, 3\]"),
        (AO8, "_weight_scale", lambda t: t * float("nan"), "not finite"),
        (AO8, "_weight_qdata", lambda t: t.float(), "is float32 .*expected int8"),
        (AO8, "_weight_qdata", lambda t: t[None].clone(), "expected a matrix"),
        (AO8, "_weight_qdata", lambda t: t[:, :80].clone(), r"block_size \[1, 32\] does not divide the 80 columns"),
        (AO3, "_weight_qdata", lambda t: t + 2, "codes of 3 bits are -4 to 3"),
        (AO4, "_weight_scale", lambda t: t[:2].clone(), "96 columns in groups of 32 have 3 scales, not 2"),
        (AO4, "_weight_zero_point", lambda t: t[:, :5].clone(), r"expected \[3, 64\]"),
        (AO4, "_weight_zero_point", lambda t: t / 0, "zero points that are not finite"),
        (AO4, "_weight_scale", lambda t: t * 0, "scales that are 0"),
        (TILES, "_weight_qdata", lambda t: t[:, :, :16].clone(), r"expected \[rows / 8, columns / 128, 32, 4\]"),
        (TILES, "_weight_qdata", lambda t: t[:4].clone(), r"it holds \[32, 1024\] codes, but the matrix is \[64, 96\]"),
        (TILES, "_weight_scale_and_zero", lambda t: t[:3].clone(), r"expected \[32, 64, 2\]"),
        (AO_FP8, "_weight_scale", lambda t: t[:3].clone(), r"expected \[4, 3\]: \[64, 96\] in blocks of \[16, 32\]"),
        (MX4, "weight_scale", None, "no weight_scale"),
        (MX4, "weight_scale", lambda t: t[:, :2].clone(), r"expected \[64, 3\] \(one for each 32 columns\)"),
        (MX4, "weight_scale", lambda t: t.float(), "no weight_scale_2"),
        (MX4, "weight", lambda t: t[:, :40].clone(), "80 codes of a row are not groups of 32"),
        (MX4, "weight", lambda t: t.repeat(1, 3)[:, :72].clone(), "144 codes of a row are not groups of 32"),
        (MX4, "weight", lambda t: t.to(torch.int32), "no weights in int4 or uint4 for it"),
        (MX6, "weight_scale", lambda t: t[:5].clone(), r"expected \[64, 4\]|not groups"),
        (MX6, "weight_scale", lambda t: t | 255, "not finite"),
        (QUARK4, "weight_scale", lambda t: t[:2].clone(), "96 columns in groups of 32 have 3 scales, not 2"),
        (QUARK4, "weight_zero_point", lambda t: t[:, :2].clone(), r"expected \[3, 8\]"),
        (QUARK4, "weight", lambda t: t[:80].clone(), "group size 32 does not divide the 80 columns"),
        (QUARK_STATIC, "input_scale", None, "no input_scale"),
        (QUARK8, "weight_zero_point", lambda t: t[:5].clone(), r"expected \[64\]"),
        (QUARK8, "weight", lambda t: t[:, :8].clone().view(torch.uint8), "expected|no weight_scale_2"),
        (HQQ, "quant_zero", lambda t: t + 1, "quantized themselves are not built"),
    ],
)
def test_what_is_wrong_is_one_error(tmp_path, form, ending, change, words):
    def tamper(tensors):
        name = f"{DOWN}.{ending}"
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor)

    write_files(tmp_path, "LlamaForCausalLM", form, tamper=tamper, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path)
    assert "down_proj" in str(caught.value) and str(tmp_path) in str(caught.value)


def with_biases(*values):
    """Biases as AutoGPTQ writes them for every matrix, of o_proj and down_proj of the first layer."""

    def tamper(tensors):
        for module, value in zip(("model.layers.0.self_attn.o_proj", DOWN), values, strict=True):
            tensors[f"{module}.bias"] = torch.zeros(64, dtype=torch.float16)
            tensors[f"{module}.bias"][7] = value

    return tamper


def test_biases_of_zeros_that_the_architecture_lacks(tmp_path):
    hf = write(tmp_path, "LlamaForCausalLM", GPTQ, tamper=with_biases(0, 0), num_hidden_layers=2)
    assert error_to(load(tmp_path), hf) < 1e-4


@pytest.mark.parametrize("value", [1e-4, float("nan")])
def test_a_bias_that_the_architecture_lacks_is_not_dropped(tmp_path, value):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, tamper=with_biases(0, value), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=rf"the bias '{DOWN}\.bias' is not zero, and the architecture has none"):
        load(tmp_path)


@pytest.mark.parametrize("form", [Form({}, GPTQ.write, "(?!)"), FP8], ids=["plain", "fp8"])
def test_biases_of_zeros_have_no_place_without_gptq(tmp_path, form):
    write_files(tmp_path, "LlamaForCausalLM", form, tamper=with_biases(0, 0), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"2 tensors have no place in it \(.*o_proj\.bias"):
        load(tmp_path)


def test_biases_that_the_architecture_has_count(tmp_path):
    hf = write(tmp_path, "Qwen2ForCausalLM", GPTQ, tamper=with_biases(0, 0), num_hidden_layers=2)
    good = load_file(tmp_path / "model.safetensors")
    assert error_to(load(tmp_path), hf) < 1e-4
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj.bias"
        other = good[name] + torch.arange(len(good[name])).to(good[name].dtype)
        save_again({**good, name: other}, tmp_path / "model.safetensors")
        assert error_to(load(tmp_path), hf) > 1e-2, part


def test_a_group_size_that_does_not_divide(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", Form({**GPTQ.config, "group_size": 40}, GPTQ.write), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"group size 40 does not divide the (64|96) columns of 'model\.layers"):
        load(tmp_path)


def test_activations_with_scales_are_refused(tmp_path):
    def tamper(tensors):
        tensors["model.layers.0.mlp.act.scales"] = torch.ones(96, dtype=torch.float16)

    write_files(tmp_path, "LlamaForCausalLM", awq(32), tamper=tamper, num_hidden_layers=2)
    with pytest.raises(NotBuiltError, match=r"'model.layers.0.mlp.act.scales' scales an activation .* not built"):
        load(tmp_path)


def test_auto_round_with_patterns_of_names(tmp_path):
    """Down projections in 8 bits and other groups."""
    four, eight = gptq(4, 32, True), gptq(8, 48, False)
    rules = {r"(mlp|other)\.down_proj": {"bits": 8, "group_size": 48, "sym": False}}
    config = {**four.config, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}
    form = Form(
        {**config, "extra_config": rules},
        lambda weight: (eight if weight.shape[1] == 96 else four).write(weight),
    )
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    assert error_to(load(tmp_path), hf) < 1e-4


def test_a_configuration_without_codes(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ.config}))
    with pytest.raises(CheckpointError, match=r"quantized \(gptq\), but no tensor is coded so"):
        load(tmp_path)


def test_a_name_that_does_not_agree(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="quantization='awq', but the checkpoint is stored as gptq"):
        load(tmp_path, quantization="awq")


def test_scales_of_a_kv_cache_are_left_out(tmp_path):
    def tamper(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)
        tensors["model.layers.1.self_attn.k_proj.output_scale"] = torch.ones(1)

    write_files(tmp_path, "LlamaForCausalLM", FP8, num_hidden_layers=2, tamper=tamper)
    load(tmp_path)


def test_transformers_own_code_refuses(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="'gptq' is built for declared architectures only"):
        load(tmp_path, model_impl="transformers")


def test_without_kernels_numbers_are_decoded(tmp_path, monkeypatch):
    write_files(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    assert same(parameters(load(tmp_path, quantization="gptq")), wanted)


def test_a_format_that_is_not_built(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", Form({"quant_method": "aqlm"}, GPTQ.write), num_hidden_layers=2)
    with pytest.raises(NotBuiltError, match="'aqlm', which is not built; the nearest supported is GPTQ with 2 bits"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            None,
            r"'model.layers.0.mlp.down_proj._weight_qdata' is one of torchao's, but the files' metadata has no 'model",
        ),
        ("[", "does not describe a tensor: '\\['"),
        ("[" * 100_000, "does not describe a tensor"),
        ('{"_type": "Int8Tensor"}', "does not describe a tensor"),
        ({"_type": "NVFP4Tensor"}, "NVFP4Tensor .*is not built; the nearest supported is NVFP4 of compressed-tensors"),
        ({"_type": "Made"}, "torchao's Made .*is not built; Float8Tensor, Int8Tensor"),
        ({"_type": "Int4Tensor"}, "qdata' is int8 .*96 columns|scale"),
        ({"_data": {"block_size": [1]}}, r"says block_size = \[1\]; expected two numbers above 0"),
        ({"_data": {"block_size": [1, -32]}}, r"says block_size = \[1, -32\]"),
        ({"_data": {"block_size": [1, 40]}}, r"block_size \[1, 40\] does not divide the 96 columns"),
        ({"_data": {"block_size": [1, 96]}}, r"expected \[64, 1\]"),
        (
            {"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 32], "target_dtype": "int9"}},
            "target_dtype = 'int9'; expected int1 to int8",
        ),
        ({"_tensor_data_names": ["qdata", "act_pre_scale"]}, "no act_pre_scale"),
    ],
)
def test_metadata_of_torchao(tmp_path, change, words):
    write_files(tmp_path, "LlamaForCausalLM", AO8, num_hidden_layers=2)
    path, name = tmp_path / "model.safetensors", f"{DOWN}.weight"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    note = about.pop(name)
    if change is not None:
        about[name] = change if isinstance(change, str) else json.dumps({**json.loads(note), **change})
    save_file(tensors, path, metadata=about)
    with pytest.raises((CheckpointError, NotBuiltError), match=words) as caught:
        load(tmp_path)
    assert "down_proj" in str(caught.value)


def test_experts_of_torchao_in_one_tensor(tmp_path):
    write_files(tmp_path, "LlamaForCausalLM", AO8, num_hidden_layers=2)
    path, module = tmp_path / "model.safetensors", "model.layers.0.mlp.experts"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    about[f"{module}.gate_up_proj"] = json.dumps({"_type": "Int8Tensor", "_data": {}})
    tensors[f"{module}._gate_up_proj_qdata"] = torch.zeros(2, 8, 8, dtype=torch.int8)
    save_file(tensors, path, metadata=about)
    with pytest.raises(CheckpointError, match=r"gate_up_proj of all experts in one tensor is not built"):
        load(tmp_path)


@pytest.mark.parametrize("form", [HQQ, AO8], ids=["hqq", "torchao"])
def test_formats_that_pickle_are_not_unpickled(tmp_path, form, monkeypatch):
    """Not even a file that could be read is opened."""
    write_files(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    def never(*args, **kwargs):
        raise AssertionError("a torch file was read")

    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(NotBuiltError, match=f"pytorch_model.bin .*{form.config['quant_method']}, which pickles"):
        load(tmp_path)


def test_files_of_hqq_itself(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "qmodel.pt")
    with pytest.raises(NotBuiltError, match=r"qmodel\.pt is a pickle of the hqq library"):
        load(tmp_path)


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
@pytest.mark.parametrize("every", [1, 3, 64])
def test_gptq_zero_points_that_borrow_from_their_neighbours(bits, ones, every):
    """Written as GPTQModel does: 1 taken from all codes of a word at once, also where a code is 0."""
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (32, 64), generator=draw)
    zeros = torch.randint(1, 1 << bits, (2, 32), generator=draw)
    zeros[:, every - 1 :: every] = 0
    scales = torch.rand((2, 32), generator=draw).half() + 0.5
    made = of_gptq(bits, codes, scales, stream(zeros, bits) - ones, sym=False)
    group = torch.arange(64) // 32
    assert torch.equal(made.numbers(), (codes - zeros.t()[:, group]) * scales.t().float()[:, group])


def of_gptq(bits, codes, scales, qzeros, **settings):
    """The one matrix of such tensors, in groups of 32, of GPTQ's first version."""
    tensors = {"qweight": stream(codes, bits).t(), "qzeros": qzeros, "scales": scales}
    directory = {f"a.{role}": TensorAbout(t.dtype, tuple(t.shape)) for role, t in tensors.items()}
    about = read_quantization({"quantization_config": {**GPTQ.config, "bits": bits, **settings}})
    (plan,) = CodedStage(directory, about).plans
    ((_, made),) = plan.make(tensors)
    return made


def test_gptq_zero_points_of_3_bits():
    """Which writers take 1 from one by one: a 0 becomes the largest code."""
    codes, zeros = torch.arange(32 * 64).view(32, 64) % 8, torch.arange(64).view(2, 32) % 8
    made = of_gptq(3, codes, torch.ones((2, 32)), stream((zeros - 1) % 8, 3), sym=False)
    assert torch.equal(made.numbers(), (codes - zeros.t()[:, torch.arange(64) // 32]).float())


SWAPPED = torch.tensor([0x24924924, 0x92492492 - (1 << 32), 0x49249249], dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_means_the_middle(bits):
    """However it is stored: one too small, as it is, or with the ones that GPTQModel once took from words of 3 bits."""
    middle = 1 << bits - 1
    codes = torch.arange(32 * 64).view(32, 64) % (1 << bits)
    plain = stream(torch.full((2, 32), middle), bits)
    for stored in (plain, stream(torch.full((2, 32), middle - 1), bits), *([plain - SWAPPED] if bits == 3 else [])):
        made = of_gptq(bits, codes, torch.ones((2, 32)), stored, sym=True)
        assert made.zero == middle and torch.equal(made.numbers(), (codes - middle).float())
    one = plain.clone()
    one[1, 0] ^= 1
    assert isinstance(of_gptq(bits, codes, torch.ones((2, 32)), one, sym=True).zero, Grid)
    assert of_gptq(bits, codes, torch.ones((2, 32)), plain, sym=False).zero == middle + 1


def test_a_plan_reads_no_tensor():
    """Shapes are checked by what directories say."""
    about = read_quantization({"quantization_config": GPTQ.config})
    directory = {
        "a.qweight": TensorAbout(torch.int32, (1 << 30, 1 << 30)),
        "a.qzeros": TensorAbout(torch.int32, (1 << 28, 1 << 27)),
        "a.scales": TensorAbout(torch.float16, (1 << 28, 1 << 30)),
    }
    assert [plan.module for plan in CodedStage(directory, about).plans] == ["a"]
    assert AffineCodes.__dataclass_fields__.keys() >= {"codes", "bits", "scale", "zero", "groups", "inputs"}


MEASURE = """
    import resource, sys
    from quire.config import EngineArgs
    from quire.loader.load import load_model
    options = dict(device="cpu", quantization=sys.argv[2] or None, dtype=sys.argv[3])
    load_model(EngineArgs(model=sys.argv[4], device="cpu", dtype="float32").create_engine_config(), "cpu")
    config = EngineArgs(model=sys.argv[1], **options).create_engine_config()
    def now():
        return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024
    import threading
    most, done, before = 0, threading.Event(), now()
    def watch():
        global most
        while not done.wait(0.001):
            most = max(most, now())
    thread = threading.Thread(target=watch, daemon=True)  # a load that fails must not wait for it
    thread.start()
    model = load_model(config, "cpu")
    done.set()
    thread.join()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(config.model_config.weight_form, size, most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the Linux kernel for its memory")
@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("quantization", "kept", "final", "work"), [("gptq", "stored", 0.7, 16), ("fp8", "int8", 1.1, 4)]
)
def test_nothing_is_decoded_to_full_size(tmp_path, quantization, kept, final, work):
    """At no time more than the final weights and a layer's work, whether codes are loaded or numbers of 16 bits are
    rounded as they come: 12 layers would take 12 times as much. `final`: bytes of a number in the end, `work`: of a
    number of the layer in work (codes, scales and decoded numbers; numbers of 16 bits in float32)."""
    folder, small = tmp_path / "model", tmp_path / "small"
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 2048}
    if quantization == "gptq":
        write_files(folder, "LlamaForCausalLM", GPTQ, **sizes)
    else:
        write_tiny("LlamaForCausalLM", folder, **sizes)
        numbers = {name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()}
        save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    write_files(small, "LlamaForCausalLM", GPTQ, num_hidden_layers=1)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "QUIRE_CACHE_ROOT": str(tmp_path), "QUIRE_CPU_PACKED_CACHE": "0",
        "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), folder, quantization, "bfloat16", small],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    form, size, most = found.stdout.split()
    numbers = 12 * (3 * 256 * 2048 + 256 * (4 * 16 + 4 * 16 + 2 * 16 * 2)) + 2 * 320 * 256
    layer = numbers / 12
    assert form == kept and int(size) < final * numbers  # 4.5 or 8.5 bits, and the outer matrices in 16
    assert int(most) < int(size) + work * layer  # all at once, decoded or in 16 bits: 48 and 24 times a layer's numbers
