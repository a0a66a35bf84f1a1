"""Sizes that do not fit one another never reach a module: every declaration passes models/limits.py."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from quire.models.arch import Arch
from quire.models.build import build_model, read_arch
from quire.models.encoder import encoder_arch
from quire.models.limits import check_arch, check_files
from quire.models.seq2seq import build_seq2seq
from quire.models.zoo import ENCODERS, ZOO
from quire.schema.errors import ConfigError, InputError
from tests.tiny_models import ARCHS, tiny_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
VALUES: tuple[Any, ...] = (0, 1, -1, 3, 7, 1 << 31, 10**30, 0.5, 2.0, 100.0, float("nan"), "x", [], [1], {}, True)


def tiny_dict(name: str) -> dict[str, Any]:
    return {**tiny_config(name).to_dict(), "architectures": [name]}


@pytest.mark.parametrize(
    "base, change, words",
    [
        (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads = 8; expected a number from 1 to 4"),
        (LLAMA, {"num_key_value_heads": 3}, "heads = 4, which is not a multiple of num_key_value_heads = 3"),
        (LLAMA, {"partial_rotary_factor": 100}, "partial_rotary_factor=100"),
        (LLAMA, {"partial_rotary_factor": 0.01}, "rotary width .* = 0"),
        (LLAMA, {"head_dim": 15}, "rotary width .* = 15; expected a number from 1 to 14"),
        (LLAMA, {"num_hidden_layers": 999_999_999}, "num_hidden_layers=999999999"),
        ({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, {"num_nextn_predict_layers": 10**9}, "nextn_predict"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size='64'"),
        (LLAMA, {"rope_theta": -1.0}, "rope_theta = -1.0"),
        (LLAMA, {"rms_norm_eps": float("inf")}, "eps = inf"),
        (LLAMA, {"rms_norm_eps": -1e-3}, "eps = -0.001; expected 0 or more"),
        (LLAMA, {"rope_scaling": {**YARN, "beta_slow": [0] * 100_000}}, "rope_parameters cannot be used .TypeError"),
        (LLAMA, {"rope_scaling": {**YARN, "beta_fast": -1}}, "rope_parameters cannot be used .ValueError"),
        (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_parameters cannot be used .KeyError"),
        (LLAMA, {"rope_scaling": {"type": "nobody's", "factor": 8.0}}, "nobody's"),
        (LLAMA, {"rope_scaling": {**YARN, "attention_factor": float("nan")}}, "its frequencies are not finite"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "1 values"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5; expected a number from 1 to 4"),
        (MIXTRAL, {"num_local_experts": 0}, "num_experts"),
        ({**LLAMA, "architectures": ["GPTJForCausalLM"]}, {"rotary_dim": 66}, "rotary width .* = 66"),
        ({**LLAMA, "architectures": ["CodeGenForCausalLM"]}, {"rotary_dim": 4096}, "rotary width .* = 4096"),
        ({**LLAMA, "architectures": ["MiniMaxM2ForCausalLM"]}, {"rotary_dim": 512}, "rotary width .* = 512"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model({**base, **change}, dtype=torch.float32)


def test_encoders_pass_here_too() -> None:
    bert = {**LLAMA, "architectures": ["BertModel"], "num_attention_heads": 0}
    with pytest.raises(InputError, match="num_attention_heads"):
        encoder_arch(bert)
    for name in ENCODERS.names():
        with pytest.raises(InputError, match="num_hidden_layers"):
            encoder_arch({**LLAMA, "architectures": [name], "num_hidden_layers": 10**9})


def test_models_of_two_halves_pass_here_too() -> None:
    bart = {"architectures": ["BartForConditionalGeneration"], "d_model": 64, "encoder_layers": 10**9}
    with pytest.raises(InputError, match="encoder_layers=1000000000"):
        build_seq2seq(bart, dtype=torch.float32)


def test_a_declaration_that_stumbles_is_an_error_of_the_file() -> None:
    with pytest.raises(ConfigError, match="the configuration of this SmolLM3ForCausalLM cannot be read"):
        read_arch({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": 7})


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0] * 4}, "4 ssm_multipliers; expected 5"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": "abcde"}, "Mamba2Kind.scales = 'a'"),
        ("FalconH1ForCausalLM", {"attention_in_multiplier": -(10**30)}, "Arch.fold = -1000"),
        ("FalconH1ForCausalLM", {"mlp_multipliers": [1.0, {}]}, "Arch.fold = {}"),
        ("Mamba2ForCausalLM", {"hidden_act": "torch.silu"}, "activation 'torch.silu'"),
        ("Mamba2ForCausalLM", {"hidden_act": 1 << 31}, "activation 2147483648"),
        ("GraniteForCausalLM", {"logits_scaling": float("nan")}, "logit_scale = nan"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6 of 6 layers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 5}, "no layer before them is of type 'full_attention'"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.5] * 5 + [1.0]}, "has 1.0; expected shares"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.5]}, "has 1 values, num_hidden_layers is 6"),
        ("Gemma3nForCausalLM", {"altup_active_idx": 3}, "altup_active_idx = 3"),
        ("Gemma3nForCausalLM", {"altup_num_inputs": 1 << 20}, "altup_num_inputs = 1048576"),
        ("Gemma3nForCausalLM", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0"),
    ],
)  # fmt: skip
def test_factors_and_activations(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_arch({**tiny_dict(name), **change})


def test_a_model_that_its_files_cannot_hold() -> None:
    for name in ARCHS:
        arch = read_arch(tiny_dict(name))
        check_files(arch, 2 * arch.vocab * arch.width)  # far less than any of them has
    deep, wide = read_arch({**LLAMA, "num_hidden_layers": 4096}), read_arch({**LLAMA, "vocab_size": 1 << 28})
    for arch in (deep, wide):
        with pytest.raises(ConfigError, match=r"describes at least .* weights, but its files have 1000000 bytes"):
            check_files(arch, 1_000_000)


def test_every_declaration_refuses_heads_that_do_not_divide() -> None:
    checked = 0
    for name in ARCHS:
        arch = read_arch(tiny_dict(name))
        attends = any(layer.mixer in ("attention", "both") for layer in arch.layers)
        if not attends or arch.mla is not None:
            continue
        checked += 1
        for over in (
            {"kv_heads": 2 * arch.heads},
            {"kv_heads": 0},
            {"heads": 0},
            {"head_dim": 0},
            {"heads": 7, "kv_heads": 2},
        ):
            with pytest.raises(ConfigError):
                check_arch(replace(arch, **over))
    assert checked > 30


def test_any_value_of_any_number_is_read_or_refused() -> None:
    began, turn = time.process_time(), cycle(VALUES)
    for name in ARCHS:
        config = tiny_dict(name)
        for key, given in config.items():
            if isinstance(given, int | float | list | dict) and not isinstance(given, bool) and key != "architectures":
                for value in (10**30, next(turn)):
                    _read_or_refused({**config, key: value})
    assert time.process_time() - began < 120


def _read_or_refused(config: dict[str, Any]) -> None:
    try:
        arch = read_arch(config)
    except InputError:
        return
    assert isinstance(arch, Arch) and len(arch.layers) <= 4096


def test_all_are_covered() -> None:
    assert set(ARCHS) <= set(ZOO.names())
