"""What a checkpoint's configuration says about its codes: read, compared with the option, or refused by name."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire.base import native
from quire.checkpoint.quantization import (
    KEY,
    Quantization,
    add_quantization,
    agrees,
    finds_pattern,
    matches_pattern,
    read_quantization,
)
from quire.config import EngineArgs
from quire.config.rounding import online_form, rounding_settings
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError, QuireError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def read(**found: Any) -> Quantization:
    quantization = read_quantization({KEY: found})
    assert quantization is not None
    return quantization


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: Path("libquire_cpu.so"))


def resolved(folder: Path, found: Any, **options: Any) -> tuple[str, str, str | None]:
    config = {**LLAMA, KEY: found} if found else LLAMA
    (folder / "config.json").write_text(json.dumps(config))
    model = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, device="cpu", **options
    ).create_engine_config().model_config  # fmt: skip
    return model.dtype, model.weight_form, model.quantization


def test_gptq() -> None:
    found = read(quant_method="gptq", bits=3, group_size=64, sym=False, desc_act=True)
    assert (found.family, found.zeros_from_one) == ("gptq", True)
    codes = found.codes
    assert (codes.bits, codes.group, codes.symmetric, codes.by_activation) == (3, 64, False, True)
    assert not read(quant_method="gptq", bits=4, checkpoint_format="gptq_v2").zeros_from_one


def test_gptq_numbers_by_module() -> None:
    rules = {"-:.*down": {}, r"+:.*\.0\..*up": {"bits": 8}, r".*\.1\..*gate": {"group_size": 32}}
    found = read(quant_method="gptq", bits=4, group_size=128, dynamic=rules)
    assert found.numbers_of("model.layers.0.mlp.up_proj").bits == 8
    assert found.numbers_of("model.layers.0.mlp.up_proj").group == 128
    assert found.numbers_of("model.layers.1.mlp.gate_proj").group == 32
    assert found.numbers_of("model.layers.1.mlp.up_proj").bits == 4
    named = read(
        quant_method="auto-round", bits=4, group_size=128, extra_config={"a.b": {"bits": 8}, "a.c": {"bits": 16}}
    )
    assert named.family == "gptq" and named.numbers_of("a.b").bits == 8 and named.numbers_of("a.bc").bits == 4
    assert read(quant_method="auto-round", bits=4, packing_format="auto_round:auto_awq").family == "awq"


@pytest.mark.parametrize(
    ("packing", "family", "from_one"),
    [
        (None, "gptq", True),
        ("auto_round:auto_gptq", "gptq", True),
        ("auto_round:gptqmodel", "gptq", False),
        ("auto_round", "gptq", False),
        ("auto_round:auto_awq", "awq", False),
    ],
)
def test_packings_of_auto_round(packing: str | None, family: str, from_one: bool) -> None:
    for name in ("auto-round", "auto_round", "intel/auto-round", "inc"):
        for key in ("packing_format", "backend"):
            found = read(quant_method=name, bits=4, **{key: packing})
            assert (found.family, found.zeros_from_one) == (family, from_one)
        assert read(quant_method=name, bits=4, backend="auto", packing_format=packing).family == family
    assert agrees("intel/auto-round", found) and agrees(family, found)


@pytest.mark.parametrize(
    ("kernel", "from_one"),
    [
        ("auto", True),
        ("auto_round:gptq:exllamav2", True),
        ("auto_round:gptq:cuda", True),
        ("auto_gptq:exllama", True),
        ("autoround:exllamav2", False),
        ("auto_round:tritonv2", False),
    ],
)
def test_kernels_that_auto_round_packed_for(kernel: str, from_one: bool) -> None:
    assert read(quant_method="intel/auto-round", bits=4, backend=kernel).zeros_from_one == from_one
    both = read(quant_method="auto-round", bits=4, backend=kernel, packing_format="auto_round:auto_gptq")
    assert both.zeros_from_one


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "gptq", "bits": 5}, "bits is 5; expected one of 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": True}, "bits is True"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; expected -1 or 1 to"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 2**40}, "group_size is"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "dynamic must be a mapping"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "not a usable pattern"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x" * 2000: {}}}, "not a usable pattern"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; expected one of 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "config_groups must be a mapping"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}}, "weights must be a mapping"),
        (quark(dtype="fp4", qscheme="per_group", group_size=-7), "group_size is -7; expected -1 or 1 to"),
        ({"quant_method": "quark", "global_quant_config": 3}, "must be a mapping"),
        ({"quant_method": "quark", "layer_quant_config": {"x" * 2000: {}}}, "not a usable pattern"),
        ({"quant_method": "quark", "layer_quant_config": [1]}, "layer_quant_config must be a mapping"),
        ({"bits": 4}, "names no quant_method"),
        ("gptq", "must be a mapping"),
    ],
)
def test_bad_values(found: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_quantization({KEY: found})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "quanto"}, "'quanto', which is not built; the nearest supported is compressed-tensors"),
        ({"quant_method": "quark", "export": {"weight_format": "fake_quantized"}}, "weight_format 'fake_quantized'"),
        (quark(dtype="mx"), "Quark's dtype 'mx' is not built; fp8_e4m3, "),
        (quark(dtype=["fp4"]), r"Quark's dtype \['fp4'\] is not built"),
        (quark(dtype="int8", qscheme="per_group"), "int8 weights with qscheme per_group are not built; per_tensor, "),
        (quark(dtype="int4", qscheme="per_channel"), "int4 weights with qscheme per_channel .* per_group is"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}}, "one tensor after another"),
        ({"quant_method": "never_seen"}, "'never_seen', which is not built; supported are awq, bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin' are not built"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' are not built; gemm is"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllama"}, "packing_format 'auto_round:exllama'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:nvfp4"}, "packing_format 'auto_round:nvfp4'"),
        ({"quant_method": "intel/auto-round", "backend": "gptqmodel:marlin"}, "packing_format 'gptqmodel:marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin's own order .* are not built; GPTQ as"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "checkpoint_format 'gemv' are not built; gemm is"),
        ({"quant_method": "awq", "version": "gemm", "format": "GEMV_FAST"}, "format 'gemv_fast' are not built"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "2:4 sparse matrices"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "2:4 sparse matrices",
        ),
        ({"quant_method": "compressed-tensors", "format": "own"}, "format 'own' are not built"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not built"),
    ],
)
def test_what_is_not_built_is_refused_by_name(found: Any, words: str) -> None:
    with pytest.raises(NotBuiltError, match=words):
        read_quantization({KEY: found})


def test_files_beside_the_configuration(tmp_path: Path) -> None:
    assert add_quantization({"a": 1}, str(tmp_path)) == {"a": 1}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert add_quantization({}, str(tmp_path))[KEY]["quant_method"] == "modelopt"
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert add_quantization({}, str(tmp_path))[KEY] == {"bits": 4, "group_size": 128, "quant_method": "gptq"}
    own = {KEY: {"quant_method": "awq"}}
    assert add_quantization(own, str(tmp_path)) is own
    (tmp_path / "quantize_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither quant_method nor bits"):
        add_quantization({}, str(tmp_path))


@pytest.mark.parametrize(
    ("option", "method", "fits"),
    [
        ("gptq_marlin", "gptq", True),
        ("moe_wna16", "gptq", True),
        ("moe_wna16", "awq", True),
        ("bitblas", "gptq", True),
        ("bitblas", "awq", False),
        ("auto_gptq", "gptq", True),
        ("auto_awq", "awq", True),
        ("awq_triton", "awq", True),
        ("awq_triton", "gptq", False),
        ("modelopt_mixed", "modelopt", True),
        ("gpt_oss_mxfp4", "mxfp4", True),
        ("awq", "gptq", False),
        ("fp8", "fbgemm_fp8", True),
        ("modelopt_fp4", "modelopt", True),
        ("compressed_tensors", "compressed-tensors", True),
        ("fp8", "compressed-tensors", False),
    ],
)
def test_options_agree_by_family(option: str, method: str, fits: bool) -> None:
    assert agrees(option, read(quant_method=method)) is fits


@pytest.mark.usefixtures("with_kernels")
def test_codes_are_kept_but_for_exact_float32(tmp_path: Path) -> None:
    found = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert resolved(tmp_path, found) == ("bfloat16", "stored", "gptq")
    assert resolved(tmp_path, found, dtype="half") == ("float16", "stored", "gptq")
    assert resolved(tmp_path, found, dtype="float32") == ("float32", "plain", "gptq")
    assert resolved(tmp_path, found, dtype="float32", quantization="gptq_marlin") == ("float32", "stored", "gptq")
    assert resolved(tmp_path, found, load_format="dummy") == ("bfloat16", "plain", "gptq")


def test_without_kernels_codes_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert resolved(tmp_path, {"quant_method": "gptq", "bits": 4}) == ("bfloat16", "plain", "gptq")


@pytest.mark.usefixtures("with_kernels")
def test_rounding_at_load_under_the_names_of_formats(tmp_path: Path) -> None:
    assert resolved(tmp_path, None, quantization="fp8") == ("bfloat16", "int8", "fp8")
    assert resolved(tmp_path, None, quantization="bitsandbytes")[1] == "int4"
    assert resolved(tmp_path, {"quant_method": "fp8"}, quantization="fp8")[1] == "stored"
    with pytest.raises(ConfigError, match="quantization='ptpc_fp8' needs an unquantized checkpoint"):
        resolved(tmp_path, {"quant_method": "fp8"}, quantization="ptpc_fp8")
    with pytest.raises(ConfigError, match="quantization='awq', but the checkpoint is not quantized"):
        resolved(tmp_path, None, quantization="awq")


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("Int8WeightOnlyConfig", "int8"),
        ("Int8DynamicActivationInt8WeightConfig", "int8"),
        ("Int4WeightOnlyConfig", "int4"),
        ("Float8WeightOnlyConfig", "int8"),  # on a CPU
        ("Float8DynamicActivationFloat8WeightConfig", "int8"),
    ],
)
def test_rounding_at_load_as_torchao_is_configured(tmp_path: Path, kind: str, form: str) -> None:
    settings = json.dumps({"_type": kind, "_version": 2, "_data": {"group_size": 32}})
    overrides = {"quantization_config_dict_json": settings}
    assert resolved(tmp_path, None, quantization="torchao", hf_overrides=overrides) == ("bfloat16", form, "torchao")
    assert online_form("torchao", overrides) == ("fp8" if kind.startswith("Float8") else form)


@pytest.mark.usefixtures("with_kernels")
def test_output_matrices_on_a_cpu_are_always_rounded(tmp_path: Path) -> None:
    assert resolved(tmp_path, None, quantization="fp8", quantization_config={"lm_head": "int8"})[1] == "int8"
    with pytest.raises(ConfigError, match="on a CPU the output matrix is rounded too"):
        resolved(tmp_path, None, quantization="fp8", quantization_config={"lm_head": None})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"linear": {"weight": None}}, "has 'linear'; the only key that is built is 'lm_head'"),
        ({"lm_head": "int4"}, "has 'lm_head': 'int4'; it may be 'int8' or 'fp8', or None"),
        ({"lm_head": ["int8"]}, "has 'lm_head': "),
        ({7: "int8"}, "has 7; the only key"),
    ],
)
def test_settings_of_rounding_that_are_wrong(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rounding_settings(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, r"needs torchao's configuration as JSON: hf_overrides=\{'quantization_config_dict_json'"),
        ("{", "is '{'; expected JSON of a mapping with _type"),
        ("[" * 100_000, "expected JSON of a mapping"),
        ('{"_type": 3}', "expected JSON of a mapping with _type"),
        ({"_type": "Int8WeightOnlyConfig"}, "expected JSON of a mapping"),
        ('{"_type": "AWQConfig"}', "torchao's 'AWQConfig' is not built as rounding at load; Int8WeightOnlyConfig, "),
    ],
)
def test_configurations_of_torchao_that_are_wrong(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        online_form("torchao", {} if settings is None else {"quantization_config_dict_json": settings})


@pytest.mark.usefixtures("with_kernels")
def test_the_strategy_that_torchao_has_a_name_for(tmp_path: Path) -> None:
    options = {"safetensors_load_strategy": "torchao"}
    assert resolved(tmp_path, {"quant_method": "torchao"}, **options) == ("bfloat16", "stored", "torchao")
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, device="cpu", **options)
    assert args.create_engine_config().load_config.safetensors_load_strategy is None
    for found, words in ((None, "is not quantized"), ({"quant_method": "fp8"}, "is stored as fp8")):
        with pytest.raises(ConfigError, match=f"'torchao' needs a checkpoint of torchao, but this one {words}"):
            resolved(tmp_path, found, **options)


@pytest.mark.usefixtures("with_kernels")
def test_names_of_other_roundings_at_load(tmp_path: Path) -> None:
    assert resolved(tmp_path, None, quantization="rtn") == ("bfloat16", "int8", "rtn")
    with pytest.raises(ConfigError, match="quantization='rtn' needs an unquantized checkpoint"):
        resolved(tmp_path, {"quant_method": "fp8"}, quantization="rtn")
    for name, nearest in (("experts_int8", "int8_wo on a CPU, fp8 on a GPU"), ("deepspeedfp", "fp8")):
        with pytest.raises(NotBuiltError, match=f"'{name}' is not built; the nearest supported is {nearest}"):
            resolved(tmp_path, None, quantization=name)
        with pytest.raises(NotBuiltError, match=f"'{name}', which is not built; the nearest supported is {nearest}"):
            resolved(tmp_path, {"quant_method": name})


@pytest.mark.parametrize(
    "value", [[], 3, "x", None, {"quant_method": []}, {"quant_method": {"a": 1}}, {"config_groups": []}]
)
def test_any_value_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(QuireError):
        read_quantization({KEY: value})


def test_patterns_are_matched_in_bounded_time() -> None:
    """Python's own engine takes for ever with these."""
    name = "model.layers.0." + "mlp." * 40 + "up_proj"
    assert read(quant_method="gptq", bits=4, dynamic={r"(\w+\.?)*#": {"bits": 8}}).numbers_of(name).bits == 4
    assert read(quant_method="gptq", bits=4, dynamic={r"(\w+\.?)*proj": {"bits": 8}}).numbers_of(name).bits == 8
    deep = read(quant_method="gptq", bits=4, dynamic={"(((((.?)*)*)*)*)*#": {"bits": 8}})
    with contextlib.suppress(CheckpointError):
        assert deep.numbers_of(name).bits == 4
    for pattern, message in ((r"(a)\1", "a back reference"), ("a" * 1025, "the limit is 1024"), ("(", "missing")):
        with pytest.raises(CheckpointError, match=f"is not a usable pattern: .*{message}"):
            read(quant_method="gptq", bits=4, dynamic={pattern: {"bits": 8}})
    with pytest.raises(CheckpointError, match=r"to match it .* takes more than 5000 steps"):
        matches_pattern("(?:(?=.*#)|.)*" * 20, name)


def test_numbers_by_name() -> None:
    config = {"a.b": {"bits": 8}, "a.c": {"bits": 16}, "a." * 900: {"bits": 2}}
    found = read(quant_method="auto-round", bits=4, extra_config=config)
    assert [found.numbers_of(one).bits for one in ("a.b", "a.bb", "a.c", "axb", "a." * 900)] == [8, 4, 4, 4, 2]


def test_every_expert_by_its_name() -> None:
    """A mixture of 256 experts in 60 layers has 46,080 matrices, each of which may have numbers of its own."""
    experts = {f"layers.{n % 60}.experts.{n // 180}.{'uvd'[n // 60 % 3]}": {"bits": 8} for n in range(46_080)}
    found = read(quant_method="auto-round", bits=4, extra_config=experts)
    assert [found.numbers_of(f"layers.59.experts.{one}").bits for one in ("255.d", "256.d")] == [8, 4]
    with pytest.raises(CheckpointError, match="extra_config must be a mapping of at most 262144 entries"):
        read(quant_method="auto-round", bits=4, extra_config={str(n): None for n in range(262_145)})
    with pytest.raises(CheckpointError, match="extra_config has 4097 patterns; at most 4096 are allowed"):
        read(quant_method="auto-round", bits=4, extra_config={f"{n}$": {"bits": 8} for n in range(4097)})


def test_numbers_by_patterns_of_names() -> None:
    """AutoRound finds its patterns anywhere in a name; a name itself goes first."""
    config = {
        r"layers\.1\..*_proj": {"bits": 8}, "^layers": {"bits": 2}, r".*\.up_proj$": {"group_size": 32},
        "model.layers.1.q_proj": {"bits": 3}, ".*lm_head.*": {"bits": 16},
    }  # fmt: skip
    found = read(quant_method="auto-round", bits=4, group_size=128, extra_config=config)
    numbers = {name: found.numbers_of(f"model.layers.{name}") for name in ("1.q_proj", "1.up_proj", "0.up_proj")}
    assert [(one.bits, one.group) for one in numbers.values()] == [(3, 128), (8, 128), (4, 32)]
    assert found.numbers_of("model.layers.0.up_projection").group == 128
    awq = read(quant_method="awq", bits=4, group_size=128, extra_config={"up_proj|gate": {"group_size": 64}})
    assert [awq.numbers_of(name).group for name in ("a.up_proj", "a.gate_proj", "a.q_proj")] == [64, 64, 128]
    with pytest.raises(CheckpointError, match="is not a usable pattern"):
        read(quant_method="auto-round", bits=4, extra_config={"up_(proj": {"bits": 8}})
    with pytest.raises(CheckpointError, match=r"to match it .* takes more than 5000 steps"):
        finds_pattern("(?:(?=.*#)|.)*" * 20, "model.layers.0." + "mlp." * 40)
