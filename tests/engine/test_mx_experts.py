"""Experts in MXFP4 packed for Hopper's kernel while they are loaded, through the real loader.

The op's reference multiplies here, in float32, so logits must be those of transformers' model of the numbers that the
checkpoint means. What the kernel could not read exactly has the form that others read, when loading is over.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM
from quire.base import env
from quire.checkpoint.quantization import read_quantization
from quire.config import EngineArgs
from quire.layers.stored import num_numbers
from quire.loader import load as loader
from quire.loader.formats.expected import expected_layout
from quire.loader.load import load_model, reload_weights
from quire.ops.coded_experts import ExpertCodes
from quire.ops.mx_experts import MxCodes, multiplies_mx
from quire.ops.op import FormTable
from quire.quant import coded_experts
from quire.quant.arena import Arena
from quire.quant.coded_experts import CodedExpertScheme
from quire.quant.coded_scheme import CodedChoice
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError
from tests.engine.lora_answers import check_like_merged
from tests.engine.test_quantized_formats import FORMS, TOLERANCE, error_to
from tests.quantized import save_again, write, write_gpt_oss
from tests.tiny_adapters import expert_modules, write_adapter
from tests.tiny_models import write_tiny

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
QWEN = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
MXFP4 = FORMS["ct-mxfp4"][0]


@pytest.fixture(autouse=True)
def _packed_on_the_cpu(monkeypatch, tmp_path):
    """The storage that Hopper gets."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    env.forget_all()
    table = FormTable("cpu")
    table.form(multiplies_mx)(lambda dtype, width, ffn, act: width % 64 == 0 and ffn % 64 == 0)

    def storage_for(config, kernels, group):
        dtype, arena = getattr(torch, config.model_config.dtype), Arena(kernels.device)
        dummy = config.load_config.load_format == "dummy"
        layout = expected_layout(read_quantization(config.model_config.hf_config)) if dummy else None
        experts = CodedExpertScheme(dtype, arena, replace(kernels, table=table), layout)
        return Storage(dtype, arena, kernels, CodedChoice(dtype, arena, kernels, experts=experts), group)

    monkeypatch.setattr(loader, "storage_for", storage_for)
    yield
    env.forget_all()


def configured(folder, **options):
    return EngineArgs(model=str(folder), dtype="float32", device="cpu", **options).create_engine_config()


def load(folder, **options):
    return load_model(configured(folder, **options), "cpu")


def sides(model):
    stored = [module.stored for name, module in model.named_modules() if name.endswith(".experts")]
    assert len(stored) == 2
    return [side for one in stored for side in (one.up, one.down)]


def forms(model):
    return {type(side.weight()) for side in sides(model)}


def test_gpt_oss(tmp_path):
    hf = write_gpt_oss(tmp_path, **SIZES)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    assert forms(model) == {MxCodes}
    assert num_numbers(model, model.parameters()) == sum(p.numel() for p in hf.parameters())
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".experts." in name}
    assert names == {"w1_codes", "w1_scale", "w2_codes", "w2_scale", "b1", "b2"}


@pytest.mark.parametrize(
    "ending", ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"]
)
def test_every_tensor_counts(tmp_path, ending):
    def tamper(tensors):
        name = f"model.layers.1.mlp.experts.{ending}"
        tensors[name] = tensors[name].roll(1, 1)

    hf = write_gpt_oss(tmp_path, tamper=tamper, **SIZES)
    assert error_to(load(tmp_path), hf) > 10 * TOLERANCE


def test_experts_one_by_one(tmp_path):
    hf = write(tmp_path, "Qwen3MoeForCausalLM", MXFP4, **QWEN)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE and forms(model) == {MxCodes}


@pytest.mark.parametrize("sizes", [{"hidden_size": 96}, {"intermediate_size": 160}])
def test_other_widths_have_the_other_form(tmp_path, sizes):
    hf = write_gpt_oss(tmp_path, **{**SIZES, **sizes})
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE and forms(model) == {ExpertCodes}


def test_other_codes_have_the_other_form(tmp_path):
    hf = write(tmp_path, "Qwen3MoeForCausalLM", FORMS["modelopt-nvfp4"][0], **QWEN)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE and forms(model) == {ExpertCodes}


def test_scales_that_the_kernel_cannot_read(tmp_path):
    """One block of the second layer has numbers below 2^-61."""

    def tamper(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 40

    hf = write_gpt_oss(tmp_path, tamper=tamper, **SIZES)
    with torch.no_grad():
        hf.model.layers[1].mlp.experts.down_proj[2, 32:64, 5] = 0
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    first, second = sides(model)[:2], sides(model)[2:]
    assert all(isinstance(side.weight(), MxCodes) for side in first)
    assert all(isinstance(side.weight(), ExpertCodes) for side in second)
    assert 0 < second[1].weight().numbers(2)[5, 32:64].abs().max() < 2**-80
    held = [name for name, _ in model.named_parameters() if "layers.1" in name and "_codes" in name]
    assert [dict(model.named_parameters())[name].dtype for name in held] == [torch.uint8] * 2


def test_one_side_alone_is_not_packed(tmp_path):
    """A down projection that is plain: no kernel takes one of both."""
    write_tiny("Qwen3MoeForCausalLM", tmp_path / "plain", **QWEN)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    form = replace(MXFP4, matrices=r"experts\.\d+\.(gate|up)_proj\.weight$")
    hf = write(tmp_path / "model", "Qwen3MoeForCausalLM", form, **QWEN)
    model = load(tmp_path / "model")
    assert error_to(model, hf) < TOLERANCE and forms(model) == {ExpertCodes, torch.nn.Parameter}
    assert torch.equal(sides(model)[1].weight()[0], plain["model.layers.0.mlp.experts.0.down_proj.weight"].float())


def test_adapters(tmp_path, monkeypatch):
    """Of tokens with an adapter, experts are decoded, some rows at a time."""
    monkeypatch.setattr(coded_experts, "_DECODED", 1 << 11)  # 16 rows
    hf = write(tmp_path / "model", "Qwen3MoeForCausalLM", MXFP4, **QWEN)
    adapters = [write_adapter(hf, tmp_path / "some", modules=expert_modules(hf, (0, 2)), seed=2)]
    options = {"max_loras": 2, "max_lora_rank": 8, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "seed": 0}
    with LLM(str(tmp_path / "model"), dtype="float32", enable_lora=True, **options) as llm:
        assert llm.apply_model(forms) == [{MxCodes}]
        check_like_merged(llm, hf, adapters, close=5e-3, different=2)


def test_weights_may_be_replaced(tmp_path):
    """In the same memory, which captured graphs read; what would need another form is refused."""
    hf = write_gpt_oss(tmp_path, **SIZES)
    config = configured(tmp_path)
    model = load_model(config, "cpu")
    places = [side.weight().codes.data_ptr() for side in sides(model)]
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    save_again({**good, name: good[name].roll(1, 1).contiguous()}, path)
    reload_weights(model, config)
    assert error_to(model, hf) > 10 * TOLERANCE
    save_again(good, path)
    reload_weights(model, config)
    assert error_to(model, hf) < TOLERANCE
    assert places == [side.weight().codes.data_ptr() for side in sides(model)]
    scales = good["model.layers.0.mlp.experts.down_proj_scales"].clone().fill_(250)
    save_again({**good, "model.layers.0.mlp.experts.down_proj_scales": scales}, path)
    with pytest.raises(ConfigError, match="must be coded as those were"):
        reload_weights(model, config)


def test_an_expert_moves_as_it_is_stored(tmp_path):
    """As between ranks: the tensors of one place, copied to another."""
    write_gpt_oss(tmp_path, **SIZES)
    model = load(tmp_path)
    stored = next(module.stored for name, module in model.named_modules() if name.endswith(".experts"))
    before = stored.up.weight().numbers(1)
    stored.replace(3, [part.clone() for part in stored.tensors_of(1)])
    assert torch.equal(stored.up.weight().numbers(3), before) and not torch.equal(stored.up.weight().numbers(0), before)


def test_dummy_weights(tmp_path):
    write_tiny("GptOssForCausalLM", tmp_path, **SIZES)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": {"quant_method": "mxfp4"}}))
    model = load(tmp_path, load_format="dummy")
    assert forms(model) == {MxCodes}
    for side in sides(model):
        numbers = side.weight().numbers(1)
        assert numbers.isfinite().all() and 0.01 < numbers.std() < 0.04
