"""Files of quantized checkpoints: in any order and number, wrong in every way, and never in memory twice."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base import env
from quire.checkpoint.quantization import read_quantization
from quire.config import EngineArgs
from quire.loader.coded_stage import CodedStage
from quire.loader.files import WeightPiece, find_weights, read_directory
from quire.loader.formats.parts import TensorAbout
from quire.loader.load import load_model
from quire.ops.cpu.native import kernels
from quire.quant.coded import AffineCodes, FloatCodes
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from tests.quantized import Form, awq, compressed, gptq, packed_ints, small_floats, static, write
from tests.tiny_models import make_tiny

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
    return CodedStage(read_directory(find_weights(str(folder))), about)


def parameters(model):
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("form", [GPTQ, PACKED, FP8], ids=["gptq", "compressed", "fp8"])
@pytest.mark.parametrize("eager", [False, True])
def test_tensors_of_a_matrix_in_any_file_and_order(tmp_path, form, eager):
    write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])  # by role, so that no matrix is in one file
    for at in range(3):
        part = {name: tensors[name] for name in reversed(names[at::3])}
        save_file(part, tmp_path / f"model-{at + 1:05}-of-00003.safetensors")
    how = {"safetensors_load_strategy": "eager"} if eager else {}
    assert same(parameters(load(tmp_path, **how)), wanted)


def test_torch_files(tmp_path):
    write(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same(parameters(load(tmp_path)), wanted)


def test_a_matrix_goes_on_as_soon_as_it_is_complete(tmp_path):
    write(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
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
    write(tmp_path, "LlamaForCausalLM", STATIC, num_hidden_layers=2)
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
    ],
)
def test_what_is_wrong_is_one_error(tmp_path, form, ending, change, words):
    def tamper(tensors):
        name = f"{DOWN}.{ending}"
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor)

    write(tmp_path, "LlamaForCausalLM", form, tamper=tamper, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path)
    assert "down_proj" in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_group_size_that_does_not_divide(tmp_path):
    write(tmp_path, "LlamaForCausalLM", Form({**GPTQ.config, "group_size": 40}, GPTQ.write), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"group size 40 does not divide the (64|96) columns of 'model\.layers"):
        load(tmp_path)


def test_a_configuration_without_codes(tmp_path):
    make_tiny("LlamaForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ.config}))
    with pytest.raises(CheckpointError, match=r"quantized \(gptq\), but no tensor is coded so"):
        load(tmp_path)


def test_a_name_that_does_not_agree(tmp_path):
    write(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="quantization='awq', but the checkpoint is stored as gptq"):
        load(tmp_path, quantization="awq")


def test_scales_of_a_kv_cache_are_left_out(tmp_path):
    def tamper(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)
        tensors["model.layers.1.self_attn.k_proj.output_scale"] = torch.ones(1)

    write(tmp_path, "LlamaForCausalLM", FP8, num_hidden_layers=2, tamper=tamper)
    load(tmp_path)


def test_transformers_own_code_refuses(tmp_path):
    write(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="'gptq' is built for declared architectures only"):
        load(tmp_path, model_impl="transformers")


def test_without_kernels_numbers_are_decoded(tmp_path, monkeypatch):
    write(tmp_path, "LlamaForCausalLM", GPTQ, num_hidden_layers=2)
    wanted = parameters(load(tmp_path))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    assert same(parameters(load(tmp_path, quantization="gptq")), wanted)


def test_a_format_that_is_not_built(tmp_path):
    write(tmp_path, "LlamaForCausalLM", Form({"quant_method": "hqq"}, GPTQ.write), num_hidden_layers=2)
    with pytest.raises(NotBuiltError, match="hqq"):
        load(tmp_path)


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
    thread = threading.Thread(target=watch)
    thread.start()
    model = load_model(config, "cpu")
    done.set()
    thread.join()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(config.model_config.weight_form, size, most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the Linux kernel for its memory")
@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
def test_nothing_is_decoded_to_full_size(tmp_path):
    """At no time more than the final weights and a layer's work: 12 layers would take 12 times as much decoded."""
    folder, small = tmp_path / "model", tmp_path / "small"
    write(folder, "LlamaForCausalLM", GPTQ, num_hidden_layers=12, hidden_size=256, intermediate_size=2048)
    write(small, "LlamaForCausalLM", GPTQ, num_hidden_layers=1)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "QUIRE_CACHE_ROOT": str(tmp_path), "QUIRE_CPU_PACKED_CACHE": "0",
        "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), folder, "gptq", "bfloat16", small],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    form, size, most = found.stdout.split()
    numbers = 12 * (3 * 256 * 2048 + 256 * (4 * 16 + 4 * 16 + 2 * 16 * 2)) + 2 * 320 * 256
    layer = numbers / 12
    assert form == "stored" and int(size) < 0.7 * numbers  # 4.5 bits, and the outer matrices in 16
    assert int(most) < int(size) + 16 * layer  # codes, scales and numbers of one layer; all decoded: 48 layers' worth
