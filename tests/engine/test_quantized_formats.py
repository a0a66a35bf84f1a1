"""Quantized checkpoints of every format, written by tests/quantized.py, loaded through the real loader.

Decoded (dtype=float32), logits are those of transformers' model of the numbers that the checkpoint means. As stored for
the CPU kernels, every matrix is that of the decoded model: to the bit where the kernels have a kind for the codes, else
within what rounding to 8 bits in blocks of 32 allows. Both ways: a change to any tensor that the numbers depend on, or
to a number of the configuration, is noticed.
"""

import json
import math
import shutil
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file

from quire.base import env
from quire.checkpoint.quantization import read_quantization
from quire.config import EngineArgs
from quire.layers.stored import packed_matrices
from quire.loader.formats.parts import Parts
from quire.loader.formats.schemes import input_coding
from quire.loader.load import load_model
from quire.ops.cpu.native import kernels
from quire.ops.packed import Packed, unpack
from quire.schema.errors import QuireError
from tests.exporters import (
    HQQ_ONLY,
    ao_float8,
    ao_int4,
    ao_integers,
    ao_tiles,
    hqq,
    quark,
    quark_int4,
    quark_int8,
    quark_mx4,
    quark_mx6,
    quark_spec,
)
from tests.paged import Paged
from tests.quantized import (
    BNB_FP4,
    LINEARS,
    NF4,
    Form,
    auto_round,
    awq,
    blocks_of_powers,
    bnb_int8,
    bnb_table,
    compressed,
    gptq,
    int4_in_bytes,
    int8_rows,
    mx4,
    mx8,
    nvfp4_compressed,
    nvfp4_modelopt,
    packed_ints,
    powers,
    save_again,
    small_floats,
    static,
    write,
    write_gpt_oss,
    write_gpt_oss_stacked,
    write_stacked,
)  # fmt: skip

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
MX8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
IDS = [list(range(4, 40)), [300, 7, 7, 25]]
TOLERANCE = 1e-4  # of logits, to the largest
EXACT, MINIMA, ROUNDED = 0.0, 2**-10, 0.5 / 127  # of a stored number, to the largest of its 32 neighbours
INPUTS_ONLY = ("input_zero_point", "input_global_scale")
NOT_NUMBERS = ("input_scale", *INPUTS_ONLY, *HQQ_ONLY)  # tensors that decoding does not read


def ints(bits, **more):
    return {"num_bits": bits, "type": "int", "symmetric": True, **more}


def modelopt(algo):
    return {"quant_method": "modelopt", "quant_algo": algo}


def without_inputs(write):
    def both(weight):
        tensors, means = write(weight)
        return {ending: tensor for ending, tensor in tensors.items() if ending != "input_scale"}, means

    return both


def fp8(**more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


ONE_INPUT_SCALE = {"input_scale": torch.tensor([0.25]), "input_zero_point": torch.tensor([3], dtype=torch.int8)}
QUARK_MX4 = quark_spec("fp4", "per_group", group_size=32, scale_format="e8m0")
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMS = {  # name: form, kind on a CPU, error of its numbers
    "gptq-4-sym": (gptq(4, 32, True), "Q4Z", EXACT),
    "gptq-4-asym": (gptq(4, 32, False), "Q4M", MINIMA),
    "gptq-4-v2": (gptq(4, 32, False, v2=True, order=False), "Q4M", MINIMA),
    "gptq-4-act-order": (gptq(4, 32, True, shuffled=True), "Q8Z", ROUNDED),
    "gptq-3-asym": (gptq(3, 32, False), "Q4Z", EXACT),
    "gptq-2": (gptq(2, 32, True), "Q4Z", EXACT),
    "gptq-8-rows": (gptq(8, -1, True), "Q8Z", EXACT),
    "awq": (awq(32), "Q4M", MINIMA),
    "auto-round": (auto_round(gptq(4, 32, True), "auto_round:auto_gptq"), "Q4Z", EXACT),
    "auto-round-gptqmodel": (auto_round(gptq(4, 32, False, v2=True), "auto_round:gptqmodel"), "Q4M", MINIMA),
    "auto-round-plain": (auto_round(gptq(4, 32, True, v2=True), "auto_round"), "Q4Z", EXACT),
    "auto-round-awq": (auto_round(awq(32), "auto_round:auto_awq"), "Q4M", MINIMA),
    "fp8-tensor-static": (
        Form(fp8(activation_scheme="static"), static(small_floats(0, 0, E4M3, "weight_scale", shape=()))),
        "Q8Z", ROUNDED,
    ),
    "fp8-rows-e5m2": (Form(fp8(), small_floats(1, 0, E5M2, "weight_scale")), "Q8Z", ROUNDED),
    "fp8-blocks": (
        Form(fp8(weight_block_size=[24, 40]), small_floats(24, 40, E4M3, "weight_scale_inv")), "Q8Z", ROUNDED,
    ),
    "fbgemm-fp8": (Form({"quant_method": "fbgemm_fp8"}, small_floats(1, 0, E4M3, "weight_scale")), "Q8Z", ROUNDED),
    "ct-w8a8-int8": (compressed("int-quantized", int8_rows(True), ints(8, strategy="channel"), TOKEN), "Q8Z", EXACT),
    "ct-w8a8-int8-static": (
        compressed("int-quantized", static(int8_rows(True), **ONE_INPUT_SCALE), ints(8, strategy="channel"),
                   ints(8, dynamic=False, strategy="tensor", symmetric=False)),
        "Q8Z", EXACT,
    ),
    "ct-w4a8-int8": (
        compressed("int-quantized", int4_in_bytes(32), ints(4, strategy="group", group_size=32), TOKEN), "Q4Z", EXACT,
    ),
    "ct-w4a8-fp8": (
        compressed("pack-quantized", packed_ints(4, 32, True), ints(4, strategy="group", group_size=32),
                   {**TOKEN, "type": "float"}),
        "Q4Z", EXACT,
    ),
    "ct-w8-asym": (compressed("int-quantized", int8_rows(False), ints(8)), "Q8Z", ROUNDED),
    "ct-w8a8-fp8": (
        compressed("float-quantized", small_floats(1, 0, E4M3, "weight_scale"), {"num_bits": 8, "type": "float"},
                   {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}),
        "Q8Z", ROUNDED,
    ),
    "ct-fp8-naive": (
        compressed("naive-quantized", small_floats(0, 0, E4M3, "weight_scale", shape=(1,)),
                   {"num_bits": 8, "type": "float"}),
        "Q8Z", ROUNDED,
    ),
    "ct-w4a16": (compressed("pack-quantized", packed_ints(4, 32, True), ints(4)), "Q4Z", EXACT),
    "ct-w4a16-asym": (compressed("pack-quantized", packed_ints(4, 32, False), ints(4)), "Q4M", MINIMA),
    "ct-w3-spare-bits": (
        compressed("pack-quantized", packed_ints(3, 32, False, spare=True), ints(3)), "Q4Z", EXACT,
    ),
    "ct-w3-act-order": (
        compressed("pack-quantized", packed_ints(3, 32, False, shuffled=True), ints(3)), "Q8Z", ROUNDED,
    ),
    "ct-w8a16": (compressed("pack-quantized", packed_ints(8, -1, True), ints(8)), "Q8Z", EXACT),
    "ct-nvfp4": (
        compressed("nvfp4-pack-quantized", nvfp4_compressed, {"num_bits": 4, "type": "float"}), "Q6Z", MINIMA,
    ),
    "ct-nvfp4-w4a4": (
        compressed("nvfp4-pack-quantized", static(nvfp4_compressed, input_global_scale=torch.tensor([64.0])),
                   {"num_bits": 4, "type": "float"}, {"num_bits": 4, "type": "float", "dynamic": "local"}),
        "Q6Z", MINIMA,
    ),
    "ct-mxfp4": (compressed("mxfp4-pack-quantized", mx4, {"num_bits": 4, "type": "float"}), "Q5Z", EXACT),
    "ct-mxfp8": (compressed("mxfp8-quantized", mx8, MX8, {**MX8, "dynamic": True}), "Q8Z", ROUNDED),
    "modelopt-fp8": (
        Form({}, static(small_floats(0, 0, E4M3, "weight_scale", shape=())), extra={
            "hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}})
        }),
        "Q8Z", ROUNDED,
    ),
    "modelopt-nvfp4": (Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt), "Q6Z", MINIMA),
    "modelopt-fp8-rows": (
        Form(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), small_floats(1, 0, E4M3, "weight_scale", shape=(-1,))),
        "Q8Z", ROUNDED,
    ),
    "modelopt-nvfp4-w4a16": (Form(modelopt("W4A16_NVFP4"), without_inputs(nvfp4_modelopt)), "Q6Z", MINIMA),
    "modelopt-mxfp8": (Form({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mx8), "Q8Z", ROUNDED),
    "bnb-nf4": (Form(BNB4, bnb_table("nf4", NF4, False)), "Q8Z", ROUNDED),
    "bnb-nf4-nested": (
        Form(BNB4, bnb_table("nf4", NF4, True)), "Q8Z", ROUNDED,
    ),
    "bnb-fp4": (Form(BNB4, bnb_table("fp4", BNB_FP4, False)), "Q8Z", ROUNDED),
    "bnb-int8": (Form({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8), "Q8Z", MINIMA),
    "hqq-8": (hqq(8, 32), "Q8Z", ROUNDED),
    "hqq-4": (hqq(4, 32, complete=True), "Q4M", MINIMA),
    "hqq-4-floats": (hqq(4, 32, as_float=True), "Q4M", MINIMA),
    "hqq-4-axis-0": (hqq(4, 16, 0), "Q8Z", ROUNDED),
    "hqq-3": (hqq(3, 32), "Q4M", MINIMA),
    "hqq-2": (hqq(2, 32), "Q4M", MINIMA),
    "hqq-1": (hqq(1, 32), "Q4M", MINIMA),
    "ao-int8": (ao_integers(8, 0, True), "Q8Z", EXACT),
    "ao-int8-32-asym": (ao_integers(8, 32, False), "Q8Z", ROUNDED),
    "ao-int8-int8": (ao_integers(8, 0, True, inputs=True), "Q8Z", EXACT),
    "ao-fp8": (ao_float8(1, 0), "Q8Z", ROUNDED),
    "ao-fp8-fp8-rows": (ao_float8(1, 0, "PerRow"), "Q8Z", ROUNDED),
    "ao-fp8-fp8-tensor": (ao_float8(0, 0, "PerTensor"), "Q8Z", ROUNDED),
    "ao-fp8-blocks": (ao_float8(16, 32, "PerBlock"), "Q8Z", ROUNDED),
    "ao-int4": (ao_int4(32), "Q4M", MINIMA),
    "ao-int4-tiles": (ao_tiles(32), "Q4M", MINIMA),
    "ao-intx-4": (ao_integers(4, 32, True), "Q4Z", EXACT),
    "ao-intx-4-asym-int8": (ao_integers(4, 32, False, inputs=True), "Q4M", MINIMA),
    "ao-intx-3": (ao_integers(3, 32, False), "Q4Z", EXACT),
    "quark-fp8-tensor-static": (
        quark(static(small_floats(0, 0, E4M3, "weight_scale", shape=())), quark_spec("fp8_e4m3", "per_tensor"),
              quark_spec("fp8_e4m3", "per_tensor")),
        "Q8Z", ROUNDED,
    ),
    "quark-fp8-rows": (
        quark(small_floats(1, 0, E4M3, "weight_scale", shape=(-1,)), quark_spec("fp8_e4m3", "per_channel"),
              quark_spec("fp8_e4m3", "per_channel", dynamic=True)),
        "Q8Z", ROUNDED,
    ),
    "quark-fp8-blocks": (
        quark(small_floats(16, 32, E4M3, "weight_scale"), quark_spec("fp8_e4m3", "per_block", block_size=[16, 32])),
        "Q8Z", ROUNDED,
    ),
    "quark-int8-rows": (
        quark(quark_int8(True), quark_spec("int8", "per_channel"), quark_spec("int8", "per_tensor", dynamic=True)),
        "Q8Z", MINIMA,
    ),
    "quark-int8-tensor": (quark(quark_int8(False), quark_spec("int8", "per_tensor")), "Q8Z", MINIMA),
    "quark-mxfp4": (quark(quark_mx4, QUARK_MX4, {**QUARK_MX4, "is_dynamic": True}), "Q5Z", EXACT),
    "quark-mxfp6-e3m2": (quark(quark_mx6(3), {**QUARK_MX4, "dtype": "fp6_e3m2"}), "Q8Z", ROUNDED),
    "quark-mxfp6-e2m3": (quark(quark_mx6(2), {**QUARK_MX4, "dtype": "fp6_e2m3"}), "Q8Z", ROUNDED),
    "quark-int4": (
        quark(quark_int4(32, signed=True), quark_spec("int4", "per_group", group_size=32)), "Q4M", MINIMA,
    ),
    "quark-uint4-in-order": (
        quark(quark_int4(32, signed=False, reorder=False), quark_spec("uint4", "per_group", group_size=32),
              pack_method="order"),
        "Q4M", MINIMA,
    ),
}  # fmt: skip
NAMES = {"modelopt-fp8": "modelopt"}  # where the configuration itself does not say


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    env.forget_all()
    yield
    env.forget_all()


def load(folder, **options):
    config = EngineArgs(model=str(folder), dtype="float32", device="cpu", **options).create_engine_config()
    return config, load_model(config, "cpu")


def error_to(model, hf):
    """Of all logits, to the largest."""
    found = Paged(model, IDS, block_size=16).step([(row, len(ids)) for row, ids in enumerate(IDS)])
    return max(((w - f).abs().max() / w.abs().max()).item() for w, f in zip(logits_of(hf), found, strict=True))


@lru_cache(maxsize=1)
def logits_of(hf):
    with torch.no_grad():
        return [hf(torch.tensor([ids])).logits[0] for ids in IDS]


class Written:
    """A checkpoint of one form, for all tests of it, and transformers' model of the numbers that it means."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.hf = write(folder, "LlamaForCausalLM", FORMS[name][0], num_hidden_layers=2)

    def own(self, folder):
        """Its files once more, to be changed: the folder, and the tensors."""
        for file in self.folder.iterdir():
            if file.is_file():
                shutil.copy(file, folder)
        return folder, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", params=list(FORMS))
def written(request, tmp_path_factory):
    return Written(request.param, tmp_path_factory.mktemp("written"))


def stored_numbers(matrix):
    return torch.cat([unpack(p) if isinstance(p, Packed) else p for p in matrix.parts.values()])


def largest_error(decoded, stored, among=32):
    """Over all packed matrices, of a number to the largest of so many neighbours; and how many numbers are packed."""
    worst, packed = 0.0, 0
    for name, matrix in packed_matrices(stored).items():
        numbers = stored_numbers(matrix)
        wanted = numbers_of(decoded, name)
        assert numbers.shape == wanted.shape, name
        if numbers.shape[1] % 32:
            assert torch.equal(numbers, wanted), name
            continue
        packed += numbers.numel()
        wanted, numbers = (each.unflatten(1, (-1, among)) for each in (wanted, numbers))
        scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        worst = max(worst, ((numbers - wanted).abs() / scale).max().item())
    return worst, packed


def numbers_of(decoded, name):
    """A matrix of the decoded model by its name in the stored one; experts lie stacked there."""
    path, _, leaf = name.rpartition(".")
    modules = dict(decoded.named_modules())
    if name in modules:
        return modules[name].stored.numbers.data
    path, _, side = path.rpartition(".")
    stack = modules[path].stored
    return (stack.w1 if side == "up" else stack.w2).data[int(leaf)]


def test_decoded_as_transformers_would_run_it(written):
    config, model = load(written.folder)
    assert config.model_config.weight_form == "plain" and config.model_config.quantization
    assert error_to(model, written.hf) < TOLERANCE


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
def test_stored_for_the_cpu_kernels(written):
    form, kind, error = FORMS[written.name]
    method = NAMES.get(written.name) or form.config["quant_method"]
    config, model = load(written.folder, quantization=method)
    assert config.model_config.weight_form == "stored"
    kinds = {part.kind for part in model.layers[1].attn.qkv.stored.packed.parts}
    assert kinds == {kind} and len(model.layers[1].attn.qkv.stored.packed.parts) == 3
    _, decoded = load(written.folder)
    worst, packed = largest_error(decoded, model)
    assert packed > 50_000 and worst <= error * 1.01
    for mine, wanted in zip(model.layers, decoded.layers, strict=True):  # inputs are rounded to 8 bits too
        for stored, plain in ((mine.attn.qkv, wanted.attn.qkv), (mine.mlp.down, wanted.mlp.down)):
            x = torch.randn(5, plain.in_size, generator=torch.Generator().manual_seed(1))
            assert (stored(x) - plain(x)).norm() < 0.02 * plain(x).norm()


def test_every_tensor_counts(tmp_path, written):
    """A change to any one tensor of a matrix is refused, or moves the logits far beyond the tolerance."""
    module = "model.layers.1.mlp.down_proj."
    folder, good = written.own(tmp_path)
    assert error_to(load(folder)[1], written.hf) < TOLERANCE
    endings = [key.removeprefix(module) for key in good if key.startswith(module)]
    assert len(endings) >= 2
    for ending in endings:
        if ending in NOT_NUMBERS:
            continue
        save_again({**good, module + ending: changed(good[module + ending])}, tmp_path / "model.safetensors")
        try:
            found = error_to(load(tmp_path)[1], written.hf)
        except QuireError as wrong:
            assert "down_proj" in str(wrong), ending
            continue
        assert not found < 20 * TOLERANCE, ending  # may be NaN


def changed(tensor):
    """Another value in some places, none of which is far from what it was."""
    if tensor.dtype == E8M0:
        return (tensor.view(torch.uint8) + 1).view(E8M0)
    if tensor.dtype in (E4M3, E5M2):
        return (tensor.view(torch.uint8) ^ 8).view(tensor.dtype)
    if tensor.is_floating_point():
        return tensor * 1.25
    if tensor.dtype == torch.int64 or tensor.numel() < 64:
        return tensor + 1
    return tensor.roll(1, -1) ^ 1


def test_every_tensor_is_needed(tmp_path, written):
    module = "model.layers.1.mlp.down_proj."
    folder, good = written.own(tmp_path)
    for ending in [key.removeprefix(module) for key in good if key.startswith(module)]:
        save_again({key: one for key, one in good.items() if key != module + ending}, tmp_path / "model.safetensors")
        without = meaning_without(written.name, ending)
        if without == "refused":
            with pytest.raises(QuireError, match="down_proj"):
                load(tmp_path)
        else:
            assert (error_to(load(folder)[1], written.hf) < TOLERANCE) == (without == "the same"), ending


def meaning_without(name, ending):
    """What a matrix is whose tensor is missing."""
    if ending in (*HQQ_ONLY, *INPUTS_ONLY, "quant_scale", "quant_zero", "weight_format"):
        return "the same"
    if ending == "input_scale":
        return "refused" if "static" in name or name == "modelopt-fp8" else "the same"
    if ending == "weight_zero_point":
        return {"quark-int8-rows": "the same", "quark-int8-tensor": "the same", "quark-uint4-in-order": "refused"}.get(
            name, "another"
        )
    if ending in ("g_idx", "weight_g_idx"):
        return "another" if "act-order" in name else "the same"
    return "refused"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gptq-4-sym", "bits", 8),
        ("gptq-4-sym", "group_size", 64),
        ("gptq-4-sym", "group_size", -1),
        ("gptq-4-sym", "checkpoint_format", "gptq_v2"),
        ("gptq-4-v2", "checkpoint_format", "gptq"),
        ("auto-round", "packing_format", "auto_round:gptqmodel"),
        ("auto-round", "packing_format", "auto_round"),
        ("auto-round-gptqmodel", "packing_format", "auto_round:auto_gptq"),
        ("awq", "group_size", 64),
        ("fp8-blocks", "weight_block_size", [40, 24]),
    ],
)
def test_every_number_counts(tmp_path, name, key, value):
    form, _, _ = FORMS[name]
    hf = write(tmp_path, "LlamaForCausalLM", Form({**form.config, key: value}, form.write), num_hidden_layers=2)
    try:
        found = error_to(load(tmp_path)[1], hf)
    except QuireError as wrong:
        assert "proj" in str(wrong)
    else:
        assert found > 20 * TOLERANCE


def test_symmetric_zero_points_that_are_not_one_too_small(tmp_path):
    """Some exporters write the middle itself, and name the first version of GPTQ, or none."""
    form = auto_round(gptq(4, 32, True, v2=True), "auto_round:auto_gptq")
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    assert error_to(load(tmp_path)[1], hf) < TOLERANCE
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**gptq(4, 32, True).config, "checkpoint_format": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert error_to(load(tmp_path)[1], hf) < TOLERANCE


OTHERS = [
    ("Qwen3ForCausalLM", "gptq-4-asym", {}, LINEARS),
    ("Qwen3ForCausalLM", "awq", {"tie_word_embeddings": True}, LINEARS),
    ("Qwen3ForCausalLM", "gptq-4-sym", {}, LINEARS.replace("(proj", "(lm_head|proj")),
    ("Phi3ForCausalLM", "ct-w4a16", {}, LINEARS),
    ("Gemma3ForCausalLM", "fp8-blocks", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "gptq-4-sym", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "awq", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "fp8-blocks", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "ct-nvfp4", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "bnb-nf4-nested", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "hqq-4", {}, LINEARS),
    ("Phi3ForCausalLM", "hqq-3", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "quark-mxfp4", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "quark-fp8-rows", {}, LINEARS),
    ("Phi3ForCausalLM", "quark-mxfp6-e2m3", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "ao-int4", {}, LINEARS),
    ("Qwen3MoeForCausalLM", "ao-fp8-fp8-rows", {}, LINEARS),
    ("Phi3ForCausalLM", "ao-int8-int8", {}, LINEARS),
    ("Qwen3ForCausalLM", "ao-int4-tiles", {}, LINEARS.replace("(proj", "(lm_head|proj")),
    ("Qwen3ForCausalLM", "ao-intx-4-asym-int8", {}, LINEARS.replace("(proj", "(embed_tokens|lm_head|proj")),
    ("DeepseekV3ForCausalLM", "fp8-blocks", {}, LINEARS),
    ("DeepseekV3ForCausalLM", "ct-w8a8-int8", {}, LINEARS),
    ("DeepseekV3ForCausalLM", "bnb-nf4", {}, LINEARS),
    ("LlamaForCausalLM", "gptq-8-rows", {"intermediate_size": 72, "head_dim": 12}, LINEARS),  # not blocks of 32
    ("LlamaForCausalLM", "bnb-nf4", {"intermediate_size": 56}, LINEARS),  # runs go over the ends of rows
    ("LlamaForCausalLM", "gptq-4-sym", {}, r"(q_proj|up_proj)\.weight$"),  # parts of a fused matrix stay plain
    ("LlamaForCausalLM", "awq", {}, r"(?<!down)_proj\.weight$"),  # whole matrices do: modules_to_not_convert
    ("LlamaForCausalLM", "gptq-4-sym", {"hidden_size": 256, "intermediate_size": 128}, LINEARS),
]


@pytest.mark.parametrize(
    ("arch", "name", "sizes", "matrices"),
    OTHERS,
    ids=[f"{arch}-{name}-{at}" for at, (arch, name, *_) in enumerate(OTHERS)],
)
def test_architectures(tmp_path, arch, name, sizes, matrices):
    form, _, error = FORMS[name]
    hf = write(tmp_path, arch, replace(form, matrices=matrices), **sizes)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is None:
        return
    _, stored = load(tmp_path, quantization=form.config["quant_method"])
    worst, packed = largest_error(decoded, stored)
    assert worst <= error * 1.01 and packed > 20_000
    assert math.isfinite(error_to(stored, hf))


BLOCKS_AND_GROUPS = {  # wider than the matrices of other tests
    "gptq-64": gptq(4, 64, True), "gptq-128": gptq(4, 128, False), "gptq-128-3-bits": gptq(3, 128, True),
    "awq-128": awq(128),
    "fp8-128": Form(fp8(weight_block_size=[128, 128]), small_floats(128, 128, E4M3, "weight_scale_inv")),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS_AND_GROUPS)
def test_usual_sizes_of_groups(tmp_path, name):
    """A file whose groups are not those that the configuration says is refused."""
    form = BLOCKS_AND_GROUPS[name]
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 1}
    hf = write(tmp_path, "LlamaForCausalLM", form, **sizes)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is not None:
        among, error = (32, ROUNDED) if name == "fp8-128" else (form.config["group_size"], MINIMA)
        worst, packed = largest_error(
            decoded,
            load(tmp_path, quantization=form.config["quant_method"])[1],
            among,  # minima are those of a group
        )
        assert packed > 200_000 and worst <= error * 1.01
    key = "weight_block_size" if name == "fp8-128" else "group_size"
    about = json.loads((tmp_path / "config.json").read_text())
    about["quantization_config"][key] = [64, 128] if name == "fp8-128" else 32
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(QuireError, match="_proj"):
        load(tmp_path)


def test_gptq_with_numbers_by_module(tmp_path):
    """GPTQModel's `dynamic`: down projections in 8 bits and other groups, attention of the first layer plain."""
    rules = {r"+:.*\.down_proj": {"bits": 8, "group_size": 48}, r"-:.*layers\.0\.self_attn": {}}
    four, eight = gptq(4, 32, True), gptq(8, 48, False)
    form = Form(
        {**four.config, "dynamic": rules},
        lambda weight: (eight if weight.shape[1] == 96 else four).write(weight),
        r"(layers\.1\.self_attn\.\w_proj|mlp\.\w+_proj)\.weight$",
    )
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    assert error_to(load(tmp_path)[1], hf) < TOLERANCE
    about = json.loads((tmp_path / "config.json").read_text())
    del about["quantization_config"]["dynamic"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(QuireError, match="down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("order", [1, -1])
def test_compressed_tensors_with_schemes_by_module(tmp_path, order):
    """Down projections in 4 bits without a scale for inputs, others in 8 with one: a matrix's tensors say which."""
    eight, four = FORMS["ct-w8a8-int8-static"][0], FORMS["ct-w4a16"][0]
    groups = {
        f"group_{at}": {**form.config["config_groups"]["group_0"], "targets": [target]}
        for at, (form, target) in enumerate([(eight, "re:.*(attn|gate|up).*"), (four, "re:.*down_proj")][::order])
    }
    form = Form(
        {**eight.config, "format": "mixed-precision", "config_groups": groups},
        lambda weight: (four if weight.shape[1] == 96 else eight).write(weight),
    )
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is not None:
        stored = load(tmp_path, quantization="compressed-tensors")[1]
        assert {part.kind for part in stored.layers[1].mlp.down.stored.packed.parts} == {"Q4Z"}
        assert {part.kind for part in stored.layers[1].mlp.up.stored.packed.parts} == {"Q8Z"}
        assert largest_error(decoded, stored)[0] == 0


def test_compressed_tensors_of_one_type_with_and_without_rounded_inputs():
    """8-bit floats everywhere; the names of modules say whose inputs are rounded."""
    config = FORMS["ct-w8a8-fp8"][0].config
    group = config["config_groups"]["group_0"]
    groups = {
        "group_0": {**group, "targets": ["re:.*(attn|gate|up).*"]},
        "group_1": {**group, "targets": ["re:.*down_proj"], "input_activations": None},
    }
    about = read_quantization({"quantization_config": {**config, "config_groups": groups}})
    for targets, words in (("x", "targets 'x' must be a list"), (["re:("], "is not a usable pattern")):
        wrong = {**config, "config_groups": {"group_0": {**group, "targets": targets}}}
        with pytest.raises(QuireError, match=words):
            read_quantization({"quantization_config": wrong})
    found = {
        name: input_coding(Parts(f"model.layers.0.mlp.{name}", {}, {}), about, "fp8").form
        for name in ("up_proj", "down_proj")
    }
    assert found == {"up_proj": "fp8", "down_proj": "none"}


LARGE = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 1}
BLOCKS_OF_128 = small_floats(128, 128, E4M3, "weight_scale_inv")


def four_axes(weight):
    tensors, means = BLOCKS_OF_128(weight)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"][:, None, :, None]}, means


def mixed(weight):
    """Down projections in NVFP4, others in fp8."""
    return (nvfp4_modelopt if weight.shape[1] == 96 else static(small_floats(0, 0, E4M3, "weight_scale")))(weight)


MODELOPT = {
    "FP8_PB_WO": (Form(modelopt("FP8_PB_WO"), BLOCKS_OF_128), LARGE, ("weight", "weight_scale_inv")),
    "FP8_PB_WO-4": (Form(modelopt("FP8_PB_WO"), four_axes), LARGE, ("weight", "weight_scale")),
    "MIXED_PRECISION": (
        Form({**modelopt("MIXED_PRECISION"), "quantized_layers": {}}, mixed),
        {"num_hidden_layers": 1}, ("weight", "weight_scale", "weight_scale_2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELOPT)
def test_forms_of_modelopt(tmp_path, name):
    """Those whose matrices are wider than other tests', or coded in several ways."""
    form, sizes, endings = MODELOPT[name]
    hf = write(tmp_path, "LlamaForCausalLM", form, **sizes)
    good = load_file(tmp_path / "model.safetensors")
    assert error_to(load(tmp_path)[1], hf) < TOLERANCE
    for module in ("mlp.down_proj", "self_attn.q_proj"):
        for ending in endings:
            key = f"model.layers.0.{module}.{ending}"
            if key in good:
                save_again({**good, key: swapped(good[key])}, tmp_path / "model.safetensors")
                assert error_to(load(tmp_path)[1], hf) > 20 * TOLERANCE, key
                save_again({k: one for k, one in good.items() if k != key}, tmp_path / "model.safetensors")
                with pytest.raises(QuireError, match=module):
                    load(tmp_path)
    if kernels() is not None:
        save_again(good, tmp_path / "model.safetensors")
        worst, packed = largest_error(load(tmp_path)[1], load(tmp_path, quantization="modelopt")[1])
        assert packed > 20_000 and worst <= ROUNDED * 1.01


POWERS = {
    "modelopt-mxfp8": Form(modelopt("MXFP8"), powers(mx8, "weight_scale")),
    "fp8": Form(fp8(weight_block_size=[24, 40]), blocks_of_powers(24, 40, "weight_scale_inv")),
}


@pytest.mark.parametrize("name", POWERS)
def test_scales_in_a_type_of_powers_of_two(tmp_path, name):
    hf = write(tmp_path, "LlamaForCausalLM", POWERS[name], num_hidden_layers=1)
    good = load_file(tmp_path / "model.safetensors")
    assert error_to(load(tmp_path)[1], hf) < TOLERANCE
    if kernels() is not None:
        worst, packed = largest_error(load(tmp_path)[1], load(tmp_path, quantization=name.partition("-")[0])[1])
        assert packed > 20_000 and worst <= ROUNDED * 1.01
    (key,) = [key for key in good if key.startswith("model.layers.0.mlp.down_proj.") and good[key].dtype == E8M0]
    save_again({**good, key: changed(good[key])}, tmp_path / "model.safetensors")
    assert error_to(load(tmp_path)[1], hf) > 20 * TOLERANCE
    save_again({**good, key: good[key][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(QuireError, match="down_proj"):
        load(tmp_path)


def swapped(tensor):
    """Blocks in another order, or another number."""
    return tensor.flip(0) if tensor.dim() and len(tensor) > 1 else tensor * 1.25


def test_gpt_oss(tmp_path):
    hf = write_gpt_oss(tmp_path)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is not None:
        _, stored = load(tmp_path, quantization="mxfp4")
        worst, packed = largest_error(decoded, stored)
        assert worst == 0 and packed > 50_000
        experts = stored.layers[0].mlp.experts.stored
        assert {part.kind for part in experts.up[0].packed.parts} == {"Q5Z"}


@pytest.mark.parametrize(
    "ending", ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"]
)
def test_gpt_oss_every_tensor_counts(tmp_path, ending):
    def tamper(tensors):
        name = f"model.layers.1.mlp.experts.{ending}"
        tensors[name] = tensors[name].roll(1, 1)

    hf = write_gpt_oss(tmp_path, tamper=tamper)
    assert error_to(load(tmp_path)[1], hf) > 20 * TOLERANCE


ONE_SCALE, NVFP4 = {"weight": "", "weight_scale": "_weight_scale"}, FORMS["modelopt-nvfp4"][0]
GPT_OSS = {
    "fp8": (Form(modelopt("FP8"), small_floats(0, 0, E4M3, "weight_scale", shape=())), ONE_SCALE),
    "fp8-rows": (Form(fp8(), small_floats(1, 0, E4M3, "weight_scale")), ONE_SCALE),
    "fp8-blocks": (Form(fp8(weight_block_size=[24, 40]), small_floats(24, 40, E4M3, "weight_scale")), ONE_SCALE),
    "nvfp4": (NVFP4, {**ONE_SCALE, "weight_scale_2": "_weight_scale_2"}),
}


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("name", GPT_OSS)
def test_gpt_oss_in_one_tensor_for_each_side(tmp_path, monkeypatch, name, inputs_first):
    """Rows of gate and up take turns, as in its MXFP4; halves one after the other would be another model."""
    form, endings = GPT_OSS[name]
    hf = write_gpt_oss_stacked(tmp_path, form, endings, inputs_first=inputs_first)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is not None:
        worst, packed = largest_error(decoded, load(tmp_path, quantization=form.config["quant_method"])[1])
        assert packed > 20_000 and worst <= ROUNDED * 1.01
    monkeypatch.setattr(
        "quire.loader.load.read_quantization", lambda config: replace(read_quantization(config), rows_in_turn=False)
    )
    assert error_to(load(tmp_path)[1], hf) > 20 * TOLERANCE


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_stacked_in_one_tensor(tmp_path, inputs_first):
    form, kind, error = FORMS["modelopt-nvfp4"]
    endings = {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"}
    hf = write_stacked(tmp_path, form, endings, inputs_first=inputs_first)
    _, decoded = load(tmp_path)
    assert error_to(decoded, hf) < TOLERANCE
    if kernels() is None:
        return
    _, stored = load(tmp_path, quantization="modelopt")
    worst, packed = largest_error(decoded, stored)
    assert worst <= error * 1.01 and packed > 20_000
    experts = stored.layers[0].mlp.experts.stored
    assert {part.kind for part in experts.up[0].packed.parts} == {kind}
