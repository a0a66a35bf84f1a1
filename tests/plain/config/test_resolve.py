"""Resolution, step by step: what is decided when nobody said, and what is refused. No model is loaded."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire.config.resolve as resolve_module
from quire.base import native
from quire.config import AsyncEngineArgs, EngineArgs, EngineConfig, UsageContext, decode, encode, replace
from quire.schema.errors import CheckpointError, ConfigError, ModelNotFoundError, NotBuiltError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "max_position_embeddings": 4096, "dtype": "float32", "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))


def resolve(folder: Path | None, usage: Any = None, /, **kwargs: Any) -> EngineConfig:
    return EngineArgs(model=None if folder is None else str(folder), **kwargs).create_engine_config(usage)


def test_every_field_is_final(folder: Path) -> None:
    config = resolve(folder, UsageContext.LLM_CLASS)
    model = config.model_config
    assert (model.model, model.path, model.tokenizer) == (str(folder),) * 3
    assert (model.dtype, model.max_model_len, model.quantization) == ("float32", 4096, None)
    assert model.hf_config == LLAMA and model.facts.num_kv_heads == 2 and model.eos_token_ids == (2,)
    assert model.architecture == "LlamaForCausalLM" and model.default_sampling == {}
    assert (model.served_model_name, model.served_model_names) == (str(folder), (str(folder),))
    assert config.cache_config.block_size == 16 and config.cache_config.enable_prefix_caching is True
    assert config.cache_config.cache_dtype == "float32" and not config.cache_config.user_specified_block_size
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (4096, 256)
    assert config.scheduler_config.async_scheduling is False and config.scheduler_config.enable_chunked_prefill is True
    assert config.device_config.device == "cpu" and config.load_config.load_format == "auto"
    assert config.instance_id and config.usage_context == "LLM_CLASS"
    assert decode(encode(config)) == config


def test_the_embedded_model() -> None:
    config = resolve(None)
    assert config.model_config.model == "SmolLM2-135M-Instruct" == config.model_config.served_model_name
    assert config.model_config.tokenizer == config.model_config.path and config.model_config.path.endswith(".gguf")
    assert (config.load_config.load_format, config.model_config.quantization) == ("gguf", "gguf")
    assert config.model_config.max_model_len == 8192 and config.model_config.dtype in ("float32", "bfloat16")


def test_the_embedded_model_samples_as_its_authors_advise() -> None:
    """At temperature 1 a model of 135M parameters talks nonsense; a request's own word still wins."""
    assert resolve(None).model_config.default_sampling == {"temperature": 0.2, "top_p": 0.9}
    assert resolve(None, generation_config="vllm").model_config.default_sampling == {}
    over = resolve(None, override_generation_config={"temperature": 0.7}).model_config.default_sampling
    assert over == {"temperature": 0.7, "top_p": 0.9}


def test_resolution_is_pure(folder: Path) -> None:
    args = EngineArgs(model=str(folder), max_num_seqs=3)
    before = dict(vars(args))
    first, second = args.create_engine_config(), args.create_engine_config()
    assert vars(args) == before
    assert replace(first, instance_id="") == replace(second, instance_id="")
    assert AsyncEngineArgs(model=str(folder)).create_engine_config().model_config == resolve(folder).model_config


# Where things are


def test_missing_and_damaged_configurations(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no architecture"):
        resolve(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such folder or file"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        resolve(tmp_path / "bad.gguf")
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="too short"):
        resolve(tmp_path / "short.gguf")


def test_config_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 99}))
    assert resolve(folder, hf_config_path=str(other)).model_config.max_model_len == 99
    assert resolve(folder, hf_config_path=str(other / "config.json")).model_config.max_model_len == 99


def test_tokenizer_places(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tok"
    other.mkdir()
    assert resolve(folder, tokenizer=str(other)).model_config.tokenizer == str(other)
    assert resolve(folder, tokenizer_revision="r").model_config.tokenizer_revision == "r"
    assert resolve(folder, revision="r").model_config.tokenizer_revision == "r"
    with pytest.raises(ModelNotFoundError):
        resolve(folder, tokenizer="some-org/not-here")
    assert resolve(folder, tokens_only=True).model_config.skip_tokenizer_init is True


def test_served_names(folder: Path) -> None:
    model = resolve(folder, served_model_name=["first", "second"]).model_config
    assert model.served_model_name == "first" and model.served_model_names == ("first", "second")
    assert resolve(folder, served_model_name="one").model_config.served_model_names == ("one",)


# hf_overrides


def test_overrides(folder: Path) -> None:
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 1.0})
    found = resolve(folder, hf_overrides={"rope_parameters": {"rope_theta": 5.0}, "extra": [1]}).model_config
    assert found.hf_config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}
    assert found.hf_config["extra"] == [1]
    assert resolve(folder, hf_overrides={"max_position_embeddings": 77}).model_config.max_model_len == 77


def test_overrides_by_callable(folder: Path) -> None:
    def patch(config: Any) -> Any:
        assert config.hidden_size == config["hidden_size"] == 64 and not hasattr(config, "nothing")
        config.max_position_embeddings = 55
        config.update({"architectures": ["MistralForCausalLM"]})
        config.nested = {"a": 1}
        config.nested.a = 2
        return config

    config = resolve(folder, hf_overrides=patch)
    assert config.model_config.max_model_len == 55 and config.model_config.architecture == "MistralForCausalLM"
    assert config.model_config.hf_config["nested"] == {"a": 2} and type(config.model_config.hf_config) is dict
    assert decode(encode(config)) == config and config.model_config.hf_overrides == {}
    with pytest.raises(ConfigError, match="it must return the configuration"):
        resolve(folder, hf_overrides=lambda config: None)


# Storage and precision


@pytest.mark.parametrize(
    "saved, asked, expected",
    [
        ({"dtype": "float32"}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float64"}, "auto", "float32"),
        ({"dtype": None}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float", "float32"),
        ({"dtype": "float32"}, "half", "float16"),
    ],
)
def test_dtype(folder: Path, saved: dict[str, Any], asked: str, expected: str) -> None:
    change(folder, **saved)
    config = resolve(folder, dtype=asked)
    assert config.model_config.dtype == expected == config.cache_config.cache_dtype


@pytest.mark.parametrize("has_units, expected", [(True, "bfloat16"), (False, "float32")])
def test_dtype_of_gguf_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, has_units: bool, expected: str) -> None:
    monkeypatch.setattr(resolve_module, "cpu_multiplies_bfloat16", lambda: has_units)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    about = resolve(None).model_config
    assert (about.dtype, about.weight_form) == (expected, "plain")


def test_gguf_blocks_stay_as_they_are_where_kernels_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: Path("libquire_cpu.so"))

    def decided(**options: Any) -> tuple[str, str]:
        about = resolve(None, **options).model_config
        return about.dtype, about.weight_form

    assert decided() == ("float32", "stored")
    assert decided(dtype="float32") == ("float32", "plain")
    assert decided(dtype="bfloat16", quantization="gguf") == ("bfloat16", "stored")


def test_quantization_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: Path("libquire_cpu.so"))
    assert resolve(folder, quantization="int8_wo").model_config.weight_form == "int8"
    assert resolve(folder, quantization="INT4_WO").model_config.weight_form == "int4"
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ConfigError, match="int8_wo' needs the compiled CPU kernels"):
        resolve(folder, quantization="int8_wo")


def test_quantized_checkpoints(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='gguf', but the checkpoint is not quantized"):
        resolve(folder, quantization="gguf")
    change(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    assert resolve(folder).model_config.quantization == "awq"
    with pytest.raises(ConfigError, match="quantization='gptq', but the checkpoint is stored as awq"):
        resolve(folder, quantization="gptq")
    with pytest.raises(ConfigError, match="int8_wo' needs an unquantized checkpoint, but this one is stored as awq"):
        resolve(folder, quantization="int8_wo")
    change(folder, quantization_config={"quant_method": "spqr"})
    with pytest.raises(NotBuiltError, match=r"quantized by 'spqr', which is not built; the nearest supported is GPTQ"):
        resolve(folder)
    assert resolve(None, quantization="gguf").model_config.quantization == "gguf"


def test_load_formats(folder: Path) -> None:
    assert resolve(folder, load_format="dummy").load_config.load_format == "dummy"
    assert resolve(None, load_format="dummy").load_config.load_format == "dummy"
    with pytest.raises(ConfigError, match="it is not a GGUF file"):
        resolve(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="it is a GGUF file"):
        resolve(None, load_format="safetensors")


def test_an_empty_name_is_not_the_embedded_model() -> None:
    with pytest.raises(ModelNotFoundError, match="model is ''"):
        EngineArgs(model="").create_engine_config()


# Length


def test_lengths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder, max_model_len=100).model_config.max_model_len == 100
    auto = resolve(folder, max_model_len=-1).model_config
    assert (auto.max_model_len, auto.original_max_model_len) == (4096, -1)
    assert resolve(folder, max_model_len="auto").model_config.original_max_model_len == -1
    with pytest.raises(ConfigError, match="max_model_len must be a whole number or 'auto', got '4k'"):
        resolve(folder, max_model_len="4k")
    for wrong in (0, -2, "many", 1.5, True):
        with pytest.raises(ConfigError, match="max_model_len"):
            resolve(folder, max_model_len=wrong)
    with pytest.raises(ConfigError, match="max_model_len=4097 is more than the model's limit of 4096"):
        resolve(folder, max_model_len=4097)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    resolve_module.env.ALLOW_LONG_MAX_MODEL_LEN.forget()
    assert resolve(folder, max_model_len=5000).model_config.max_model_len == 5000


def test_length_of_windows_and_of_silence(folder: Path) -> None:
    change(folder, sliding_window=512)
    assert resolve(folder).model_config.max_model_len == 4096
    assert resolve(folder).cache_config.sliding_window == 512
    assert resolve(folder, disable_sliding_window=True).model_config.max_model_len == 512
    with pytest.raises(ConfigError, match="limit of 512"):
        resolve(folder, disable_sliding_window=True, max_model_len=600)
    change(folder, max_position_embeddings=None)
    assert resolve(folder).model_config.max_model_len == 2048
    assert resolve(folder, max_model_len=9000).model_config.max_model_len == 9000


# Sampling


def generation(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_default_sampling(folder: Path, tmp_path: Path) -> None:
    generation(folder, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=100, do_sample=True, eos_token_id=[5, 6],
               min_p=None)  # fmt: skip
    model = resolve(folder).model_config
    assert model.default_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 100}
    assert model.eos_token_ids == (5, 6)
    plain = resolve(folder, generation_config="vllm").model_config
    assert plain.default_sampling == {} and plain.eos_token_ids == (5, 6)
    over = resolve(folder, override_generation_config={"temperature": 0.1, "top_k": None, "max_new_tokens": 7})
    assert over.model_config.default_sampling == {"temperature": 0.1, "top_p": 0.95, "max_tokens": 7}
    alone = resolve(folder, generation_config="vllm", override_generation_config={"min_p": 0.1})
    assert alone.model_config.default_sampling == {"min_p": 0.1}
    other = tmp_path / "other"
    other.mkdir()
    generation(other, repetition_penalty=1.1)
    assert resolve(folder, generation_config=str(other)).model_config.default_sampling == {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -5, "says temperature=-5: temperature must be .*0.* got -5"),
        ("top_p", 7, "says top_p=7: top_p must be .*1.* got 7"),
        ("max_new_tokens", 0, "says max_new_tokens=0: max_tokens must be at least 1"),
    ],
)
def test_overriding_defaults_are_checked_as_a_requests_values(
    folder: Path, key: str, value: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=f"override_generation_config {words}"):
        resolve(folder, override_generation_config={key: value})
    generation(folder, **{key: value})
    with caplog.at_level("WARNING"):
        assert resolve(folder).model_config.default_sampling == {}
    assert f"{key} of generation_config='auto' is ignored" in caplog.text


def test_the_log_says_where_default_sampling_comes_from(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation(folder, temperature=0.6, top_k=20)
    with caplog.at_level("INFO"):
        resolve(folder, override_generation_config={"temperature": 0.1})
        resolve(folder, generation_config="vllm", override_generation_config={"top_p": 0.5})
    said = [record.getMessage() for record in caplog.records if "default sampling" in record.getMessage()]
    assert said == [
        "default sampling: top_k=20 (from the model; generation_config='vllm' switches it off), "
        "temperature=0.1 (from override_generation_config)",
        "default sampling: top_p=0.5 (from override_generation_config)",
    ]


@pytest.mark.parametrize("option", ["tokenizer", "generation_config", "hf_config_path"])
@pytest.mark.parametrize(("value", "words"), [("/nope", "no such folder or file"), ("some-org/nope", "HF_HUB_OFFLINE")])
def test_what_is_not_there_is_named_by_its_option(folder: Path, option: str, value: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"^{option} '{value}'.*{words}") as caught:
        resolve(folder, **{option: value})
    assert caught.value.param == option


@pytest.mark.parametrize("length", [0, 1])
def test_a_context_has_two_tokens_at_least(folder: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"^max_model_len must be at least 2 .*; got {length}$"):
        resolve(folder, max_model_len=length)


@pytest.mark.parametrize("name", ["", " ", ["a", ""]])
def test_a_served_name_is_not_empty(folder: Path, name: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"served_model_name is .*at least one character"):
        resolve(folder, served_model_name=name)


def test_wrong_sampling_defaults(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="override_generation_config has 'do_sample'; allowed are"):
        resolve(folder, override_generation_config={"do_sample": True})
    with pytest.raises(ConfigError, match=r"top_k=0\.5; expected a whole number"):
        resolve(folder, override_generation_config={"top_k": 0.5})
    generation(folder, temperature="hot")
    with pytest.raises(ConfigError, match="temperature='hot'"):
        resolve(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no generation_config\.json"):
        resolve(folder, generation_config=str(tmp_path / "empty"))


# Batches


@pytest.mark.parametrize(
    "usage, kwargs, tokens, requests",
    [
        ("LLM_CLASS", {}, 4096, 256),
        (UsageContext.OPENAI_API_SERVER, {}, 2048, 128),
        (None, {}, 2048, 128),
        ("ENGINE_CONTEXT", {}, 2048, 128),
        ("LLM_CLASS", {"max_num_seqs": 3, "max_model_len": 100}, 300, 3),
        ("LLM_CLASS", {"max_num_batched_tokens": 64}, 64, 64),
        ("LLM_CLASS", {"max_num_seqs": 8000}, 8000, 8000),
        ("OPENAI_API_SERVER", {"enable_chunked_prefill": False}, 4096, 128),
        ("LLM_CLASS", {"max_model_len": 4, "max_num_seqs": 2}, 8, 2),
    ],
)
def test_batches(folder: Path, usage: Any, kwargs: dict[str, Any], tokens: int, requests: int) -> None:
    scheduler = resolve(folder, usage, **kwargs).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, requests)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens=4 is less than max_num_seqs=8"),
        (
            {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
            "max_num_batched_tokens=512 is less than max_model_len=4096",
        ),
        ({"max_long_partial_prefills": 2}, "more than max_num_partial_prefills=1"),
        (
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
            "needs chunked prefill",
        ),
        ({"long_prefill_token_threshold": 5000}, "is more than max_model_len=4096"),
        ({"scheduling_policy": "random"}, "one of fcfs, priority"),
        ({"prefix_caching_hash_algo": "md5"}, "one of sha256"),
        ({"watermark": -0.1}, "at least 0"),
    ],
)
def test_limits_that_cannot_be_met(folder: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(folder, **kwargs)


def test_long_prompts(folder: Path) -> None:
    config = resolve(folder, max_num_partial_prefills=3, max_long_partial_prefills=2).scheduler_config
    assert config.long_prefill_token_threshold == 163  # 4% of 4096
    chosen = resolve(folder, max_num_partial_prefills=3, long_prefill_token_threshold=9).scheduler_config
    assert chosen.long_prefill_token_threshold == 9


def test_reuse(folder: Path) -> None:
    assert resolve(folder, enable_prefix_caching=False).cache_config.enable_prefix_caching is False
    change(folder, layer_types=["linear_attention", "full_attention"])
    assert resolve(folder).cache_config.enable_prefix_caching is False
    assert resolve(folder, enable_prefix_caching=True).cache_config.enable_prefix_caching is True
    assert resolve(folder, async_scheduling=True).scheduler_config.async_scheduling is True
    assert resolve(folder, block_size=32).cache_config.user_specified_block_size is True


# Refusals come first, and decisions are told


def test_unbuilt_options_are_refused_before_anything_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotBuiltError, match="prefill_context_parallel_size=2"):
        resolve(tmp_path / "nowhere", prefill_context_parallel_size=2)


def test_options_that_encoder_decoders_lack_are_refused(folder: Path) -> None:
    change(folder, is_encoder_decoder=True, architectures=["BartForConditionalGeneration"])
    assert resolve(folder).model_config.takes_media
    with pytest.raises(NotBuiltError, match="encoder-decoder model, for which pipeline_parallel_size=2"):
        resolve(folder, pipeline_parallel_size=2)


def test_decisions_are_logged(folder: Path) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    keep, log = Keep(), logging.getLogger("quire")
    level = log.level
    log.addHandler(keep)
    log.setLevel("DEBUG")
    try:
        change(folder, dtype="float16")
        resolve(folder)
    finally:
        log.removeHandler(keep)
        log.setLevel(level)
    assert any("INFO dtype: bfloat16 (the checkpoint is float16" in line for line in lines)
    assert "INFO max_model_len: 4096 (the model's limit)" in lines
    assert any(line.startswith("DEBUG async_scheduling: off") for line in lines)
    assert all("\n" not in line for line in lines)


def test_steps_are_named_and_documented() -> None:
    names = [step.__name__ for step in resolve_module.STEPS]
    assert names[0] == "refuse" and names.index("find_model") < names.index("read_model") < names.index("choose_length")
    assert all(step.__doc__ for step in resolve_module.STEPS)


def test_resolving_imports_no_heavy_module() -> None:
    code = (
        "import sys\nfrom quire.config import EngineArgs, FlexibleArgumentParser\n"
        "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"
        "EngineArgs.from_cli_args(parser.parse_args([])).create_engine_config()\n"
        "print([m for m in ('torch', 'transformers', 'yaml', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def test_blocks_are_larger_on_a_gpu(folder: Path) -> None:
    assert resolve(folder, device="cuda").cache_config.block_size == 64
    assert resolve(folder, device="cuda", block_size=32).cache_config.block_size == 32
    assert resolve(folder, device="cpu").cache_config.block_size == 16
