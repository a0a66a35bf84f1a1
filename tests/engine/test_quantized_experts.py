"""Experts kept as codes: tiny quantized mixtures through the real loader into the storage that GPU kernels read.

The op's reference multiplies here, in float32, so logits must be those of transformers' model of the numbers that the
checkpoint means; a change to any tensor of one expert moves them. What kernels have no layout for is decoded.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.base import env
from quire.checkpoint.quantization import read_quantization
from quire.config import EngineArgs
from quire.layers.stored import num_numbers
from quire.loader import load as loader
from quire.loader.dummy import fill_dummy
from quire.loader.formats.expected import expected_layout
from quire.loader.load import load_model, make_model
from quire.ops.coded_experts import ExpertCodes, close_chunks, open_chunks
from quire.ops.op import Kernels
from quire.quant import coded_experts
from quire.quant.arena import Arena
from quire.quant.coded import AffineCodes, Grid
from quire.quant.coded_experts import MXFP4, CodedExperts, CodedExpertScheme, CodedSide, CodeLayout, round_to_fp8
from quire.quant.coded_scheme import CodedChoice
from quire.quant.scheme import MatrixShape, Storage
from quire.quant.shard import Span
from quire.schema.errors import ConfigError, QuireError
from tests.engine.lora_answers import check_like_merged
from tests.engine.test_quantized_formats import FORMS, TOLERANCE, changed, error_to, fp8
from tests.exporters import HQQ_ONLY, hqq
from tests.quantized import (
    Form,
    blocks_of_powers,
    compressed,
    gptq,
    packed_ints,
    save_again,
    small_floats,
    write,
    write_files,
    write_gpt_oss,
    write_stacked,
)  # fmt: skip
from tests.tiny_adapters import expert_modules, write_adapter
from tests.tiny_adapters import write_stacked as write_stacked_adapter
from tests.tiny_models import write_tiny

E4M3 = torch.float8_e4m3fn
EXPERTS = r"experts\.\d+\.\w+\.weight$"
BLOCKS = Form(fp8(weight_block_size=[128, 128]), small_floats(128, 128, E4M3, "weight_scale_inv"))
POWERS = Form(fp8(weight_block_size=[128, 128]), blocks_of_powers(128, 128, "weight_scale_inv"))
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
MORE = {
    **{name: form for name, (form, _, _) in FORMS.items()},
    "fp8-rows": Form(fp8(), small_floats(1, 0, E4M3, "weight_scale")),
    "fp8-blocks-128": BLOCKS,
    "fp8-blocks-powers": POWERS,
    "gptq-4-128": gptq(4, 128, False),
    "ct-w4a16-64": compressed("pack-quantized", packed_ints(4, 64, False), INT4),
    "hqq-2-64": hqq(2, 64),
    "ct-w4a16-rows": compressed("pack-quantized", packed_ints(4, -1, True), INT4),
}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 128}
KEPT = [  # architecture, form, sizes, the form of codes (w1, w2); None: decoded
    ("Qwen3MoeForCausalLM", "fp8-rows", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "fp8-tensor-static", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "fp8-blocks-128", WIDE, "e4m3"),
    ("Qwen3MoeForCausalLM", "fp8-blocks-128", {"moe_intermediate_size": 160, "hidden_size": 192}, "e4m3"),
    ("Qwen3MoeForCausalLM", "fp8-blocks-powers", WIDE, "e4m3"),
    ("Qwen3MoeForCausalLM", "fp8-rows-e5m2", {}, None),
    ("Qwen3MoeForCausalLM", "fp8-blocks", {"moe_intermediate_size": 80}, None),
    ("Qwen3MoeForCausalLM", "gptq-4-sym", {}, "int4"),
    ("Qwen3MoeForCausalLM", "gptq-4-asym", {}, "int4"),
    ("Qwen3MoeForCausalLM", "gptq-4-128", WIDE, "int4"),
    ("Qwen3MoeForCausalLM", "gptq-4-act-order", {"moe_intermediate_size": 64}, None),
    ("Qwen3MoeForCausalLM", "gptq-3-asym", {}, "int4"),
    ("Qwen3MoeForCausalLM", "gptq-8-rows", {}, None),
    ("Qwen3MoeForCausalLM", "awq", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ct-w4a16", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ct-w4a16-asym", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ct-w4a16-64", WIDE, "int4"),
    ("Qwen3MoeForCausalLM", "ct-w4a16-rows", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ct-w8a8-fp8", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "ct-w8a8-int8", {}, None),
    ("Qwen3MoeForCausalLM", "ct-mxfp4", {}, "e2m1"),
    ("Qwen3MoeForCausalLM", "ct-mxfp8", {}, None),
    ("Qwen3MoeForCausalLM", "ct-nvfp4", {}, "e2m1"),
    ("Qwen3MoeForCausalLM", "modelopt-nvfp4", {}, "e2m1"),
    ("Qwen3MoeForCausalLM", "modelopt-fp8", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "bnb-nf4", {}, None),
    ("Qwen3MoeForCausalLM", "hqq-4", {}, "int4"),
    ("Qwen3MoeForCausalLM", "hqq-2-64", WIDE, "int4"),
    ("Qwen3MoeForCausalLM", "hqq-4-axis-0", {}, None),
    ("Qwen3MoeForCausalLM", "quark-mxfp4", {}, "e2m1"),
    ("Qwen3MoeForCausalLM", "quark-fp8-tensor-static", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "quark-mxfp6-e3m2", {}, None),
    ("Qwen3MoeForCausalLM", "quark-int4", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ao-int4", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ao-int4-tiles", {}, "int4"),
    ("Qwen3MoeForCausalLM", "ao-fp8-fp8-rows", {}, "e4m3"),
    ("Qwen3MoeForCausalLM", "ao-int8-int8", {}, None),
    ("Qwen3MoeForCausalLM", "ao-intx-4", {}, "int4"),
    ("MixtralForCausalLM", "fp8-rows", {}, "e4m3"),
    ("MixtralForCausalLM", "awq", {}, "int4"),
    ("DeepseekV3ForCausalLM", "fp8-blocks-128", {}, "e4m3"),
    ("DeepseekV3ForCausalLM", "ct-w4a16", {}, "int4"),
]
IDS = [f"{arch.removesuffix('ForCausalLM')}-{name}-{at}" for at, (arch, name, *_) in enumerate(KEPT)]


@pytest.fixture(autouse=True)
def _coded_on_the_cpu(monkeypatch, tmp_path):
    """The storage that a GPU gets."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    env.forget_all()

    def storage_for(config, kernels, group):
        dtype, arena = getattr(torch, config.model_config.dtype), Arena(kernels.device)
        rounds, dummy = config.model_config.weight_form == "fp8", config.load_config.load_format == "dummy"
        about = read_quantization(config.model_config.hf_config) if dummy else None
        layout = None if about is None else expected_layout(about)
        experts = CodedExpertScheme(dtype, arena, kernels, layout, rounds)
        return Storage(dtype, arena, kernels, CodedChoice(dtype, arena, kernels, experts=experts), group)

    monkeypatch.setattr(loader, "storage_for", storage_for)
    yield
    env.forget_all()


def configured(folder, **options):
    return EngineArgs(model=str(folder), dtype="float32", device="cpu", **options).create_engine_config()


def load(folder, **options):
    return load_model(configured(folder, **options), "cpu")


def mixtures(model):
    return [module.stored for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize(("arch", "name", "sizes", "form"), KEPT, ids=IDS)
def test_logits_are_those_of_the_numbers_that_codes_mean(tmp_path, arch, name, sizes, form):
    experts_only = arch == "MixtralForCausalLM" or name == "gptq-4-128"  # others have other names, or are too narrow
    written = replace(MORE[name], matrices=EXPERTS) if experts_only else MORE[name]
    hf = write(tmp_path, arch, written, num_hidden_layers=2, **sizes)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    found = mixtures(model)
    assert found
    for stored in found:
        for side in (stored.up, stored.down):
            weight = side.weight()
            assert (weight.form if isinstance(weight, ExpertCodes) else None) == form
            held = {name for name, _ in side.parameters()}
            assert (side.name in held) == (form is None) and (f"{side.name}_codes" in held) == (form is not None)


COUNTING = [
    "fp8-rows",
    "gptq-4-asym",
    "awq",
    "ct-w4a16-asym",
    "modelopt-nvfp4",
    "ct-mxfp4",
    "hqq-4",
    "ao-int4",
    "ao-intx-3",
]


@pytest.mark.parametrize("name", COUNTING)
def test_every_tensor_of_an_expert_counts(tmp_path, name):
    hf = write(tmp_path, "Qwen3MoeForCausalLM", MORE[name], num_hidden_layers=2)
    good = load_file(tmp_path / "model.safetensors")
    module = next(key for key in good if ".experts.2.down_proj." in key).rpartition(".")[0] + "."
    for ending in [key.removeprefix(module) for key in good if key.startswith(module)]:
        if ending in ("input_scale", "g_idx", "weight_shape", *HQQ_ONLY):
            continue
        save_again({**good, module + ending: changed(good[module + ending])}, tmp_path / "model.safetensors")
        try:
            found = error_to(load(tmp_path), hf)
        except QuireError as wrong:
            assert "down_proj" in str(wrong), ending
            continue
        assert not found < 10 * TOLERANCE, ending  # may be NaN


def test_gpt_oss(tmp_path):
    hf = write_gpt_oss(tmp_path)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    assert num_numbers(model, model.parameters()) == sum(p.numel() for p in hf.parameters())
    for stored in mixtures(model):
        assert stored.up.weight().form == stored.down.weight().form == "e2m1"
        assert stored.up.weight().scale.dtype == torch.uint8 and stored.b1 is not None


@pytest.mark.parametrize("ending", ["gate_up_proj_blocks", "down_proj_scales", "gate_up_proj_bias"])
def test_gpt_oss_every_tensor_counts(tmp_path, ending):
    def tamper(tensors):
        name = f"model.layers.1.mlp.experts.{ending}"
        tensors[name] = tensors[name].roll(1, 1) + (0 if ending.endswith(("blocks", "scales")) else 0.5)

    hf = write_gpt_oss(tmp_path, tamper=tamper)
    assert error_to(load(tmp_path), hf) > 10 * TOLERANCE


ADAPTED = ["fp8-rows", "fp8-blocks-128", "gptq-4-asym", "ct-mxfp4", "gptq-8-rows"]


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_coded_experts(tmp_path, name, monkeypatch):
    """Of tokens with an adapter, experts are decoded, a few rows at a time; others take the codes."""
    monkeypatch.setattr(coded_experts, "_DECODED", 1 << 12)
    hf = write(tmp_path / "model", "Qwen3MoeForCausalLM", MORE[name], **(WIDE if name == "fp8-blocks-128" else {}))
    adapters = [
        write_stacked_adapter(hf, tmp_path / "all", seed=1, config={"peft_version": "0.21.2"}),
        write_adapter(hf, tmp_path / "some", modules=expert_modules(hf, (0, 2)), seed=2),
    ]
    options = {"max_loras": 2, "max_lora_rank": 8, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "seed": 0}
    with LLM(str(tmp_path / "model"), dtype="float32", enable_lora=True, **options) as llm:
        stored = [type(module.stored) for module in llm.apply_model(experts_of)[0]]
        assert stored and set(stored) == {CodedExperts}
        check_like_merged(llm, hf, adapters, close=5e-3, different=3)


def experts_of(model):
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def test_rows_that_are_decoded_alone():
    """With blocks of rows, and a last one that is not whole."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randn((2, 9, 64), generator=draw).to(E4M3)
    scale = torch.rand((2, 3, 2), generator=draw)
    coded = ExpertCodes("e4m3", codes, 64, scale, block=(4, 32), row_scale=torch.rand((2, 9), generator=draw))
    whole = coded.numbers(1)
    assert torch.equal(torch.cat([coded.numbers(1, at, at + 4) for at in (0, 4, 8)]), whole)
    assert not torch.equal(whole[:4], whole[4:8])


ROW_SCALES = {"weight": "", "weight_scale": "_scale"}
STACKS = {  # form, endings of its tensors, the form of codes
    "fp8-rows": ("fp8-rows", ROW_SCALES, "e4m3"),
    "fp8-experts": (
        "fp8-tensor-static",
        {"weight": "", "weight_scale": "_scale_inv", "input_scale": "_activation_scale"},
        "e4m3",
    ),
    "fp8-blocks": ("fp8-blocks-128", {"weight": "", "weight_scale_inv": "_scale_inv"}, "e4m3"),
    "fp8-blocks-powers": ("fp8-blocks-powers", {"weight": "", "weight_scale_inv": "_scale_inv"}, "e4m3"),
    "nvfp4": (
        "modelopt-nvfp4",
        {
            "weight": "",
            "weight_scale": "_weight_scale",
            "weight_scale_2": "_weight_scale_2",
            "input_scale": "_input_scale",
        },
        "e2m1",
    ),
}


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("name", STACKS)
def test_experts_stacked_in_one_tensor(tmp_path, name, inputs_first):
    """As published: rows or inputs first. ffn 96: a block of 128 has rows of gate and of up."""
    form, endings, kind = STACKS[name]
    sizes = {"hidden_size": 192, "moe_intermediate_size": 96, "num_hidden_layers": 2}
    hf = write_stacked(tmp_path, MORE[form], endings, inputs_first=inputs_first, **sizes)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    assert {side.weight().form for stored in mixtures(model) for side in (stored.up, stored.down)} == {kind}


def test_inputs_come_first_and_scales_of_rows_do_not(tmp_path):
    """Llama 4 as transformers' fbgemm experts write it: down_proj_scale is [experts, rows, 1]."""

    def turn(tensors):
        for name in tensors:
            if name.endswith("down_proj_scale"):
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
                assert tensors[name].shape[2] == 1

    form, endings, kind = STACKS["fp8-rows"]
    hf = write_stacked(tmp_path, MORE[form], endings, inputs_first=True, tamper=turn, num_hidden_layers=1)
    model = load(tmp_path)
    assert error_to(model, hf) < TOLERANCE
    assert {side.weight().form for stored in mixtures(model) for side in (stored.up, stored.down)} == {kind}


@pytest.mark.parametrize("name", STACKS)
def test_every_stacked_tensor_counts(tmp_path, name):
    form, endings, _ = STACKS[name]
    hf = write_stacked(tmp_path, MORE[form], endings, inputs_first=True, num_hidden_layers=2)
    good = load_file(tmp_path / "model.safetensors")
    for side in ("gate_up_proj", "down_proj"):
        for ending in endings.values():
            if ending in ("_activation_scale", "_input_scale"):
                continue
            key = f"model.layers.1.mlp.experts.{side}{ending}"
            save_file({**good, key: changed(good[key])}, tmp_path / "model.safetensors")
            try:
                found = error_to(load(tmp_path), hf)
            except QuireError as wrong:
                assert side in str(wrong), key
                continue
            assert not found < 10 * TOLERANCE, key  # may be NaN


def test_stacks_that_do_not_fit_are_refused(tmp_path):
    form, endings, _ = STACKS["fp8-rows"]
    write_stacked(tmp_path, MORE[form], endings, inputs_first=False)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts."
    for key, value, message in (
        ("gate_up_proj", good[name + "gate_up_proj"][:, :-2], "are neither"),
        ("down_proj", good[name + "down_proj"].float(), "are neither"),
        ("down_proj_scale", good[name + "down_proj_scale"][:, 1:], "per row"),
        ("down_proj_scale", good[name + "down_proj_scale"] * float("nan"), "not finite"),
        ("down_proj_scale", None, "has no scales"),
        ("down_proj", None, "there is no"),
    ):
        tensors = {**good, name + key: None if value is None else value.contiguous()}
        save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(QuireError, match=message):
            load(tmp_path)


def test_plain_experts_are_rounded_to_fp8(tmp_path, monkeypatch):
    """As each comes: no tensor of all experts in more bits is ever made."""
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    config = configured(tmp_path)
    object.__setattr__(config.model_config, "weight_form", "fp8")
    model = load_model(config, "cpu")
    for layer, stored in enumerate(mixtures(model)):
        assert stored.up.plain is None and stored.up.weight().codes.dtype == E4M3
        for expert in range(4):
            names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            gate, up, down = (plain[name].float() for name in names)
            for side, numbers in ((stored.up, torch.cat((gate, up))), (stored.down, down)):
                error = (side.weight().numbers(expert) - numbers).abs()
                largest = numbers.abs().amax(1, keepdim=True)
                assert bool((error <= numbers.abs() / 16 + largest / 448 / 512 * 1.01).all()) and error.max() > 0


def test_zero_points_may_come_late():
    """A symmetric matrix first, then one with zero points; then one in another layout, which decodes all."""
    shape = MatrixShape({"down_proj": Span.all(8)}, Span.all(64))
    dice = torch.Generator().manual_seed(0)
    side = CodedSide("w2", 3, shape, torch.float32, Arena(torch.device("cpu")), None, False)
    codes = torch.randint(0, 16, (3, 8, 64), generator=dice).to(torch.uint8)
    scale = Grid(torch.rand(8, 2, generator=dice) + 0.5, 1, 32)
    zeros = scale._replace(values=torch.randint(0, 17, (8, 2), generator=dice).to(torch.int16))
    given = [
        AffineCodes(codes[0], 4, scale, 8),
        AffineCodes(codes[1], 4, scale, zeros),
        AffineCodes(codes[2], 4, scale, 3),
    ]
    for expert, matrix in enumerate(given):
        side.put(expert, 0, matrix)
    assert side.weight().zero is not None
    for expert, matrix in enumerate(given):
        assert torch.equal(side.weight().numbers(expert), matrix.numbers())
    side.put(1, 0, AffineCodes(codes[1], 8, scale, 3))
    assert isinstance(side.weight(), torch.Tensor)
    assert torch.equal(side.weight()[0], given[0].numbers()) and torch.equal(side.weight()[2], given[2].numbers())
    assert torch.equal(side.weight()[1], AffineCodes(codes[1], 8, scale, 3).numbers())


def test_chunks_open_as_they_were_closed():
    codes = torch.randint(0, 16, (3, 200), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = close_chunks(codes)
    assert packed.shape == (3, 128) and packed[0, 0] == codes[0, 0] | codes[0, 64] << 4
    assert torch.equal(open_chunks(packed)[:, :200], codes) and not open_chunks(packed)[:, 200:].any()


def test_rows_of_zeros_can_be_rounded():
    part = round_to_fp8(torch.zeros(2, 8))
    assert part.row_scale.isfinite().all() and not part.codes.float().any()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (fp8(), CodeLayout("e4m3", by_row=True)),
        (fp8(weight_block_size=[128, 128]), CodeLayout("e4m3", block=(128, 128), scale=torch.float32)),
        (fp8(weight_block_size=[24, 40]), None),
        ({"quant_method": "mxfp4"}, MXFP4),
        (MORE["gptq-4-128"].config, CodeLayout("int4", block=(1, 128), scale=torch.bfloat16, zeros=torch.uint8)),
        (MORE["gptq-8-rows"].config, None),
        (MORE["modelopt-nvfp4"].config, CodeLayout("e2m1", by_row=True, block=(1, 16), scale=E4M3)),
        (MORE["ct-w8a8-fp8"].config, CodeLayout("e4m3", by_row=True)),
        (MORE["ct-mxfp8"].config, None),
        (MORE["quark-fp8-rows"].config, CodeLayout("e4m3", by_row=True)),
    ],
)
def test_dummy_weights_have_the_layout_of_the_configuration(tmp_path, settings, wanted):
    write_tiny("Qwen3MoeForCausalLM", tmp_path, moe_intermediate_size=64, hidden_size=128)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": settings}))
    assert expected_layout(read_quantization({"quantization_config": settings})) == wanted
    config = configured(tmp_path, load_format="dummy")
    model = make_model(config, Kernels.here("cpu"))
    fill_dummy(model, 0)
    for stored in mixtures(model):
        weight = stored.up.weight() if wanted is not None else None
        if weight is None:
            continue
        numbers = weight.numbers(1)
        assert numbers.isfinite().all() and 0.01 < numbers.std() < 0.04
    ids = [list(range(4, 20))]
    if wanted is not None:
        from tests.paged import Paged

        logits = Paged(model, ids, block_size=16).step([(0, len(ids[0]))])
        assert logits[0].isfinite().all()


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "LlamaForCausalLM"])
def test_what_a_gpu_keeps(tmp_path, arch):
    """Codes, of the checkpoint or of fp8 while loading; all numbers for exact float32, unless codes are asked for."""
    write_tiny(arch, tmp_path)
    options = {"model": str(tmp_path), "device": "cuda", "dtype": "bfloat16"}
    assert EngineArgs(**options, quantization="fp8").create_engine_config().model_config.weight_form == "fp8"
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": fp8()}))
    for more, expected in (
        ({}, "stored"),
        ({"load_format": "dummy"}, "stored"),
        ({"load_format": "sharded_state"}, "plain"),
        ({"dtype": "float32"}, "plain"),
        ({"dtype": "float32", "quantization": "fp8"}, "stored"),
    ):
        assert EngineArgs(**{**options, **more}).create_engine_config().model_config.weight_form == expected, more


def test_one_expert_alone_computes_what_all_do(tmp_path):
    """As adapters of experts need it: the two matmuls of one expert, apart."""
    write_files(tmp_path, "Qwen3MoeForCausalLM", MORE["awq"])
    stored = mixtures(load(tmp_path))[0]
    x, one = torch.randn(3, stored.shape.matrices()[0].width.count), torch.ones(3, 1)
    for expert in range(2):
        alone = stored.multiply_down(expert, stored.shape.act(stored.multiply_up(expert, x)))
        together = stored.multiply(x, one, torch.full((3, 1), expert, dtype=torch.int32))
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stored.multiply_up(0, x), stored.multiply_up(1, x))


def test_experts_that_replace_others_are_coded_alike(tmp_path):
    """Graphs read the memory of the first ones: another form would leave it behind."""
    write_files(tmp_path, "Qwen3MoeForCausalLM", MORE["awq"])
    model = load(tmp_path)
    side = mixtures(model)[0].up
    codes = side.codes
    rows, width = side.shape.rows, side.shape.width.count
    with pytest.raises(ConfigError, match="must be coded as those were"):
        side.put(0, 0, torch.zeros(rows, width))
    assert side.codes is codes and side.plain is None
