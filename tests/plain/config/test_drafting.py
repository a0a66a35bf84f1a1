"""speculative_config: every key, and one clear error for each thing that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.config.drafting import METHODS, UNBUILT, SpeculativeConfig
from quire.config.engine import decode, encode, replace
from quire.config.foreign import meant_by
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip
MAMBA = {**LLAMA, "architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def resolve(tmp_path: Path) -> Any:
    def run(speculative: Any = None, model: Any = LLAMA, **options: Any) -> SpeculativeConfig | None:
        (tmp_path / "config.json").write_text(json.dumps(model))
        more = {"device": "cpu", "skip_tokenizer_init": True, **options}
        args = EngineArgs(model=str(tmp_path), speculative_config=speculative, **more)
        config: SpeculativeConfig | None = args.create_engine_config().speculative_config
        return config

    return run


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        (NGRAM, ("ngram", 3, 2, 5)),
        ({**NGRAM, "prompt_lookup_max": 4}, ("ngram", 3, 1, 4)),
        ({**NGRAM, "prompt_lookup_min": 3}, ("ngram", 3, 3, 3)),
        ({**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 7}, ("ngram", 3, 2, 7)),
        ({"model": "[ngram]", "num_speculative_tokens": 1}, ("ngram", 1, 2, 5)),
        ({"method": "suffix"}, ("suffix", 32, None, None)),
        ({"method": "suffix", "num_speculative_tokens": 8}, ("suffix", 8, None, None)),
        ({"method": "custom_class", "model": "a.b:C", "num_speculative_tokens": 2}, ("custom_class", 2, None, None)),
    ],
)
def test_defaults(resolve: Any, speculative: dict[str, Any], expected: tuple[Any, ...]) -> None:
    made = resolve(speculative)
    assert (made.method, made.num_speculative_tokens, made.prompt_lookup_min, made.prompt_lookup_max) == expected


def test_shorthands(resolve: Any) -> None:
    assert resolve(spec_method="ngram", spec_tokens=4) == resolve({**NGRAM, "num_speculative_tokens": 4})
    with pytest.raises(ConfigError, match="shorthands for its keys; give either"):
        resolve(NGRAM, spec_tokens=4)
    assert resolve() is None


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1 and at most 128, got 0"),
        ({**NGRAM, "num_speculative_tokens": 129}, "num_speculative_tokens must be .* at most 128, got 129"),
        ({"method": "ngram"}, "speculative_config: method 'ngram' needs num_speculative_tokens, at least 1"),
        ({"num_speculative_tokens": 2}, "it names neither a method nor a model"),
        ({**NGRAM, "method": "ngrams"}, "method 'ngrams' is unknown; .*did you mean 'ngram'"),
        ({**NGRAM, "numspeculative_tokens": 2}, "speculative_config has no key 'numspeculative_tokens'; did you mean"),
        ({**NGRAM, "tensor_parallel_size": 2}, "has no key 'tensor_parallel_size'; did you mean 'draft_tensor_"),
        ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min=5 is more than prompt_lookup_m"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max must be at least 1, got 0"),
        ({**NGRAM, "model": "some/model"}, "method 'ngram' has no draft model, and model is 'some/model'"),
        ({**NGRAM, "disable_by_batch_size": 0}, "disable_by_batch_size must be at least 1, got 0"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[4, 2, 1]]}, r"has \(4, 2, 1\); it takes triples"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob must be at"),
        ({"method": "custom_class", "num_speculative_tokens": 2}, "method 'custom_class' needs model"),
        ("ngram", "speculative_config must be a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_once(resolve: Any, speculative: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(speculative)


@pytest.mark.parametrize("method", UNBUILT)
def test_methods_that_are_not_built_are_refused_by_name(resolve: Any, method: str) -> None:
    with pytest.raises(NotBuiltError, match=f"method '{method}' is not available .*methods are {', '.join(METHODS)}"):
        resolve({"method": method, "model": "x", "num_speculative_tokens": 2})


def test_a_model_alone_is_a_draft_model(resolve: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    keys = {"model": str(draft), "num_speculative_tokens": 2}
    made = resolve({**keys, "max_model_len": 64, "draft_load_config": {"load_format": "dummy"}})
    assert made.method == "draft_model" and made.drafter.model_config.facts.num_layers == 1
    assert made.drafter.model_config.max_model_len == 64 and made.drafter.load_config.load_format == "dummy"
    assert resolve(keys).drafter.model_config.max_model_len == 256
    assert decode(encode(EngineArgs(
        model=str(tmp_path), speculative_config=keys, device="cpu", skip_tokenizer_init=True,
    ).create_engine_config())).speculative_config == resolve(keys)  # fmt: skip


MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1}
SPECULATOR = {"model_type": "mlp_speculator", "n_predict": 3, "emb_dim": 64, "vocab_size": 100, "inner_dim": 32}
LIBRARY: dict[str, Any] = {
    "speculators_model_type": "eagle3", "draft_vocab_size": 50, "norm_before_residual": True,
    "transformer_layer_config": {**LLAMA, "num_hidden_layers": 1},
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "other", "speculative_tokens": 9}, {"proposal_type": "greedy", "speculative_tokens": 5},
        ],
        "verifier": {"name_or_path": "x"},
    },
}  # fmt: skip


@pytest.fixture
def draft(resolve: Any, tmp_path: Path) -> Any:
    """Resolves with a drafter of this configuration."""

    def run(raw: dict[str, Any], name: str = "draft", model: Any = LLAMA, **keys: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        return resolve({"model": str(tmp_path / name), **keys}, model)

    return run


@pytest.mark.parametrize(
    ("raw", "name", "keys", "expected"),
    [
        (MEDUSA, "draft", {}, ("medusa", 3)),
        ({"model_type": "medusa", "num_heads": 4, "num_hidden_layers": 1}, "draft", {}, ("medusa", 4)),
        (MEDUSA, "draft", {"num_speculative_tokens": 2}, ("medusa", 2)),
        (SPECULATOR, "draft", {}, ("mlp_speculator", 3)),
        (LIBRARY, "draft", {}, ("eagle3", 5)),
        (LIBRARY, "draft", {"num_speculative_tokens": 7}, ("eagle3", 7)),
        (LLAMA, "EAGLE-tiny", {"num_speculative_tokens": 2}, ("eagle", 2)),
        (LLAMA, "EAGLE3-tiny", {"num_speculative_tokens": 2}, ("eagle3", 2)),
        ({**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}, "x", {"num_speculative_tokens": 2}, ("eagle3", 2)),
        (LLAMA, "draft", {"method": "eagle", "num_speculative_tokens": 2}, ("eagle", 2)),
        (LLAMA, "draft", {"num_speculative_tokens": 2}, ("draft_model", 2)),
    ],
)  # fmt: skip
def test_a_drafter_says_what_it_is(draft: Any, raw: Any, name: str, keys: Any, expected: tuple[str, int]) -> None:
    made = draft(raw, name, **keys)
    assert (made.method, made.num_speculative_tokens) == expected
    facts = made.drafter.model_config.facts
    assert (facts.hidden_size, facts.vocab_size) == (64, 100)
    whole = EngineArgs(device="cpu", skip_tokenizer_init=True).create_engine_config()
    whole = replace(whole, speculative_config=made)
    assert decode(encode(whole)).speculative_config == made, "another process gets the same"


MTP = {**LLAMA, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp"])
def test_multi_token_prediction_is_of_the_model_itself(resolve: Any, method: str) -> None:
    made = resolve({"method": method, "num_speculative_tokens": 3}, MTP)
    assert (made.method, made.num_speculative_tokens, made.drafter, made.has_drafter) == ("mtp", 3, None, True)
    assert resolve({"method": method}, MTP).num_speculative_tokens == 1


@pytest.mark.parametrize("keys", [{}, {"mtp_num_hidden_layers": 1}])
def test_modules_of_which_a_configuration_says_nothing(resolve: Any, keys: dict[str, int]) -> None:
    model = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **keys}
    assert resolve({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, model).method == "mtp"
    with pytest.raises(ConfigError, match="has no num_nextn_predict_layers"):
        resolve({"method": "mtp"}, {**model, "mtp_num_hidden_layers": 0})


@pytest.mark.parametrize(
    ("raw", "keys", "error", "words"),
    [
        (MEDUSA, {"num_speculative_tokens": 4}, ConfigError, "=4, and the drafter has 3 heads, one for each token"),
        (MEDUSA, {"num_speculative_tokens": 0}, ConfigError, "num_speculative_tokens must be at least 1"),
        ({**SPECULATOR, "emb_dim": 32}, {}, ConfigError, "reads hidden states of 32 numbers, and the model's have 64"),
        ({**SPECULATOR, "vocab_size": 90}, {}, ConfigError, "vocabulary of 90 tokens, and the model one of 100"),
        ({"model_type": "medusa"}, {"num_speculative_tokens": 1}, ConfigError, "neither num_heads nor medusa_num_hea"),
        ({"model_type": "mlp_speculator"}, {"num_speculative_tokens": 1}, ConfigError, "has no n_predict"),
        (LLAMA, {"method": "eagle"}, ConfigError, "method 'eagle' needs num_speculative_tokens"),
        ({**LLAMA, "hidden_size": 32}, {"method": "eagle", "num_speculative_tokens": 1}, ConfigError, "states of 32"),
        ({**LLAMA, "model_type": "gemma"}, {"method": "eagle3", "num_speculative_tokens": 1}, NotBuiltError, "'gemma'"),
        ({**LIBRARY, "target_hidden_size": 48}, {}, ConfigError, "reads hidden states of 48 numbers"),
        ({**LIBRARY, "norm_before_fc": True}, {}, NotBuiltError, "norm_before_fc=True is not built"),
        ({**LIBRARY, "speculators_model_type": "peagle"}, {}, NotBuiltError, "for 'peagle' cannot be used"),
        ({**LIBRARY, "speculators_config": 3}, {}, CheckpointError, "speculators_config is 3; expected a mapping"),
        (LIBRARY, {"draft_tensor_parallel_size": 2}, ConfigError, "=2: it may be 1 or that of the model, which is 1"),
    ],
)  # fmt: skip
def test_drafters_that_cannot_draft(draft: Any, raw: Any, keys: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"speculative_config.*{words}|{words}"):
        draft(raw, **keys)


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        (LLAMA, {"method": "mtp"}, "configuration of LlamaForCausalLM has no num_nextn_predict_layers"),
        (MTP, {"method": "mtp", "model": "other"}, "drafts with the model's own weights, and model is 'other'"),
        (MTP, {"method": "eagle", "num_speculative_tokens": 2}, "method 'eagle' needs model"),
        (MTP, {"method": "mtp", "revision": "main"}, "revision='main' is for draft models"),
    ],
)
def test_models_that_cannot_be_drafted_for(resolve: Any, model: Any, keys: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config: .*{words}"):
        resolve(keys, model)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ({"method": "draft_model", "num_speculative_tokens": 2}, "method 'draft_model' needs model"),
        ({"model": "x/y", "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({**NGRAM, "quantization": "gguf"}, "quantization='gguf' is for draft models, and method 'ngram' has none"),
        ({**NGRAM, "revision": "main"}, "revision='main' is for draft models"),
    ],
)
def test_keys_of_draft_models(resolve: Any, speculative: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(speculative)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits_processors": ["a.b:C"]}, "custom logits processors"),
        ({"runner": "pooling"}, "pooling models generate nothing"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "not built for ranks that a launcher starts",
        ),
        ({"device": "cuda", "tensor_parallel_size": 2}, "drafts with several ranks are built for CPU only"),
        ({"device": "cuda", "model": MAMBA}, "recurrent states after drafts are kept on CPU only"),
    ],
)
def test_what_excludes_drafts(resolve: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotBuiltError, match=rf"speculative_config \(method 'ngram'\): .*{words}"):
        resolve(NGRAM, **options)


def test_devices(resolve: Any) -> None:
    assert resolve(NGRAM, device="cuda").method == "ngram"
    with pytest.raises(NotBuiltError, match="drafts are drawn on CPU only"):
        resolve(
            {"method": "draft_model", "model": "x/y", "num_speculative_tokens": 2}
            | {"draft_sample_method": "probabilistic"},
            device="cuda",
        )


def test_ranks(resolve: Any, draft: Any) -> None:
    assert resolve(NGRAM, tensor_parallel_size=2).method == "ngram"
    own = {"method": "custom_class", "model": "a.b:C", "num_speculative_tokens": 2}
    with pytest.raises(NotBuiltError, match="a class of yours may draft otherwise on each rank"):
        resolve(own, tensor_parallel_size=2)
    with pytest.raises(NotBuiltError, match="pipeline_parallel_size=2: speculative decoding does not work across"):
        resolve(NGRAM, pipeline_parallel_size=2)


def test_how_drafts_are_chosen(resolve: Any, draft: Any) -> None:
    made = draft(MEDUSA, draft_sample_method="probabilistic", rejection_sample_method="standard")
    assert made.draft_sample_method == "probabilistic" and draft(MEDUSA).draft_sample_method == "greedy"
    assert resolve({"method": "mtp", "draft_sample_method": "probabilistic"}, MTP).draft_sample_method != "greedy"
    for keys, error, words in (
        (
            {**NGRAM, "draft_sample_method": "probabilistic"},
            ConfigError,
            "needs a drafter with distributions, and meth",
        ),
        ({**NGRAM, "draft_sample_method": "best"}, ConfigError, "draft_sample_method"),
        ({**NGRAM, "rejection_sample_method": "other"}, ConfigError, "rejection_sample_method"),
    ):
        with pytest.raises(error, match=words):
            resolve(keys)


SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}, (0.9, 0.5, 0.5)),
        ({"synthetic_acceptance_length": 2.25}, (1.0, 0.25, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 4}, (1.0, 1.0, 1.0)),
    ],
)
def test_acceptance_may_be_invented(resolve: Any, keys: dict[str, Any], rates: tuple[float, ...]) -> None:
    assert resolve({**SYNTHETIC, **keys}).synthetic_acceptance_rates == rates


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "needs synthetic_acceptance_rates or synthetic_acceptance_length, one of the two"),
        ({"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2}, "one of the two"),
        ({"synthetic_acceptance_rates": [0.5, 0.5]}, r"=\[0.5, 0.5\] must be 3 numbers from 0 to 1 that do not rise"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "must be 3 numbers from 0 to 1 that do not rise"),
        ({"synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "must be 3 numbers from 0 to 1 that do not rise"),
        ({"synthetic_acceptance_rates": [float("nan")] * 3}, "must be 3 numbers from 0 to 1 that do not rise"),
        ({"synthetic_acceptance_length": 4.5}, "synthetic_acceptance_length=4.5 must be at least 1 and at most 4"),
        ({"rejection_sample_method": "standard", "synthetic_acceptance_length": 2}, "need rejection_sample_method="),
    ],
)  # fmt: skip
def test_acceptance_that_cannot_be_invented(resolve: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config: .*{words}"):
        resolve({**SYNTHETIC, **keys})


def test_options_of_a_drafter(draft: Any, resolve: Any) -> None:
    keys = {"method": "draft_model", "num_speculative_tokens": 2}
    made = draft(LLAMA, **keys, attention_backend="torch_sdpa", enforce_eager=True, moe_backend="triton")
    assert made.drafter.attention_backend == "TORCH_SDPA" and made.enforce_eager
    assert draft(LLAMA, **keys).drafter.attention_backend is None
    assert (
        draft(LLAMA, **keys, disable_padded_drafter_batch=True, use_local_argmax_reduction=True).method
        == keys["method"]
    )
    with pytest.raises(ConfigError, match="attention_backend='TORCH_SDPA' is for draft models, and method 'ngram' has"):
        resolve({**NGRAM, "attention_backend": "TORCH_SDPA"})
    with pytest.raises(NotBuiltError, match="code_revision"):
        draft(LLAMA, **keys, code_revision="main")


def test_all_drafts_in_one_pass(draft: Any, resolve: Any) -> None:
    keys = {"method": "draft_model", "num_speculative_tokens": 2, "parallel_drafting": True}
    assert draft({**LLAMA, "pard_token": 7}, **keys).drafter.unknown_token == 7
    assert draft({**LLAMA, "ptd_token_id": 8}, **keys).drafter.unknown_token == 8
    for raw in (LLAMA, {**LLAMA, "pard_token": 100}, {**LLAMA, "pard_token": "7"}):
        with pytest.raises(
            ConfigError, match="needs a draft model whose configuration has a pard_token or ptd_token_id"
        ):
            draft(raw, **keys)
    with pytest.raises(ConfigError, match=r"parallel_drafting is for draft models .*, not for method 'ngram'"):
        resolve({**NGRAM, "parallel_drafting": True})


def test_n_grams_of_a_gpu_are_n_grams(resolve: Any) -> None:
    assert resolve({**NGRAM, "method": "ngram_gpu"}) == resolve(NGRAM)


def test_models_with_states(resolve: Any) -> None:
    assert resolve(NGRAM, MAMBA).method == "ngram"


def test_old_flags_are_refused_by_name() -> None:
    for flag in ("--speculative-model", "--num_speculative_tokens", "--ngram-prompt-lookup-max"):
        assert "--speculative-config" in (meant_by(flag) or "")
