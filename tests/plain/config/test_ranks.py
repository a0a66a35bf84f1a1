"""How many workers a configuration asks for, and who starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.config import EngineArgs
from quire.config.ranks import MOST_RANKS
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError
from tests.fake_engine import FakeExecutor
from tests.plain.config.test_hints import LLAMA

DIVIDED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


def resolve(folder: Path, *, model: dict[str, Any] | None = None, **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA | (model or {"num_key_value_heads": 1})))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **{"device": "cpu"} | options)
    return args.create_engine_config().parallel_config


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, None),
        ({"distributed_executor_backend": "mp"}, "mp"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "some.module:Executor"}, "some.module:Executor"),
        ({"pipeline_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "mp"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2}, "external_launcher"),
        ({"tensor_parallel_size": 4, "nnodes": 2, "master_addr": "10.0.0.1"}, "mp"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 4, "node_rank": 3}, "mp"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "mp"),
    ],
)
def test_who_starts_the_workers(options: dict[str, Any], backend: str | None, tmp_path: Path) -> None:
    parallel = resolve(tmp_path, **options)
    sizes = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    assert parallel.world_size == sizes[0] * sizes[1]
    assert parallel.distributed_executor_backend == backend


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, ConfigError, "'uni' is one worker"),
        (
            {"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2},
            ConfigError,
            "node_rank is 2; it must be below nnodes=2",
        ),
        ({"node_rank": 1}, ConfigError, "node_rank is 1; it must be below nnodes=1"),
        ({"tensor_parallel_size": 1000}, ConfigError, "heads cannot be shared out among 1000 ranks"),
        (
            {"tensor_parallel_size": 3},
            ConfigError,
            "tensor_parallel_size=3: .* cannot be shared out among 3 ranks; sizes that divide them are 1, 2, ",
        ),
        ({"pipeline_parallel_size": 900}, ConfigError, "pipeline_parallel_size=900 is more than the model's"),
        ({"nnodes": 2}, ConfigError, "1 rank .tensor_parallel_size 1. cannot be shared out among nnodes=2"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, ConfigError, "3 ranks .tensor_parallel_size 3. cannot be shared"),
        ({"nnodes": 4, "tensor_parallel_size": 2, "data_parallel_size": 2}, NotBuiltError, "nnodes=4 with data_par"),
        ({"nnodes": 2, "data_parallel_size": 3}, ConfigError, "3 engines cannot be shared out among nnodes=2"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            ConfigError,
            "nnodes=2 needs distributed_executor_backend='mp', not 'ray'",
        ),
        (
            {"nnodes": 2, "data_parallel_size": 2, "distributed_executor_backend": "ray"},
            ConfigError,
            "nnodes=2 needs distributed_executor_backend='mp', not 'ray'",
        ),
        (
            {"enable_lora": True, "distributed_executor_backend": "external_launcher"},
            NotBuiltError,
            "adapters are read",
        ),
        (
            {"inter_token_latency_goal_ms": 5.0, "distributed_executor_backend": "external_launcher"},
            NotBuiltError,
            "goes by a clock",
        ),
        ({"enable_eplb": True, "tensor_parallel_size": 2}, ConfigError, "enable_eplb: it needs enable_expert_parallel"),
        ({"enable_eplb": True, "enable_expert_parallel": True}, ConfigError, "enable_eplb: there is one rank"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2},
            ConfigError,
            "enable_eplb: a model of type 'llama' has no experts to balance",
        ),
        (
            {"enable_eplb": True, "enable_expert_parallel": True, "data_parallel_size": 2},
            ConfigError,
            "enable_eplb: a model of type 'llama' has no experts to balance",
        ),
        (
            {"eplb_config": {"num_redundant_experts": 2}},
            ConfigError,
            "num_redundant_experts is 2, which needs enable_e",
        ),
        ({"eplb_config": {"step_interval": 0}}, ConfigError, "step_interval"),
        (
            {
                "enable_eplb": True,
                "enable_expert_parallel": True,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
            },
            NotBuiltError,
            "enable_eplb: experts do not move together with pipeline stages",
        ),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 4},
            ConfigError,
            "decode_context_parallel_size=4 must divide tensor_parallel_size=2",
        ),
        ({"decode_context_parallel_size": 0}, ConfigError, "at least 1"),
        ({"dcp_comm_backend": "a2a"}, ConfigError, "dcp_comm_backend='a2a' needs decode_context_parallel_size above 1"),
        (DIVIDED | {"block_size": 8, "cp_kv_cache_interleave_size": 3}, ConfigError, "=3 must divide block_size=8"),
        (DIVIDED | {"cp_kv_cache_interleave_size": 32}, ConfigError, "=32 must divide block_size=16"),
        (DIVIDED | {"runner": "pooling"}, NotBuiltError, "size=2 is not built for a pooling model"),
        (
            DIVIDED | {"kv_cache_dtype": "int8_per_token_head"},
            NotBuiltError,
            "size=2 is not built for a KV cache in int8 on CPUs",
        ),
        (DIVIDED | {"prefill_context_parallel_size": 2}, NotBuiltError, "all tokens of a prompt"),
        ({"tensor_parallel_size": MOST_RANKS + 1}, ConfigError, f"at most {MOST_RANKS} ranks"),
        ({"tensor_parallel_size": 0}, ConfigError, "at least 1"),
        ({"pipeline_parallel_size": 0}, ConfigError, "at least 1"),
        (
            {"tensor_parallel_size": 64, "pipeline_parallel_size": 32},
            ConfigError,
            "tensor_parallel_size 64 and pipeline_parallel_size 32: at most",
        ),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, ConfigError, "'uni' is one worker"),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, NotBuiltError, "pipeline_parallel_size=2: pooling"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            NotBuiltError,
            "pipeline_parallel_size=2: speculative decoding",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        resolve(tmp_path, **options)


def test_a_class_of_executors_goes_as_its_import_path(tmp_path: Path) -> None:
    parallel = resolve(tmp_path, tensor_parallel_size=2, distributed_executor_backend=FakeExecutor)
    assert parallel.distributed_executor_backend == "tests.fake_engine:FakeExecutor"
    with pytest.raises(ConfigError, match=r"expected a class or an import path like 'package.module:Name', got 7"):
        resolve(tmp_path, distributed_executor_backend=7)


def test_contexts_are_divided_on_gpus_too(tmp_path: Path) -> None:
    options = DIVIDED | {"device": "cuda", "kv_cache_dtype": "int8_per_token_head"}
    assert resolve(tmp_path, **options).decode_context_parallel_size == 2


def test_batch_invariant_contexts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    with pytest.raises(NotBuiltError, match=r"size=2 is not built for batch-invariant mode"):
        resolve(tmp_path, **DIVIDED)


def test_contexts_are_divided_among_ranks_with_the_same_heads_of_keys(tmp_path: Path) -> None:
    pair = {"num_key_value_heads": 2}
    with pytest.raises(ConfigError, match=r"size=2 .* it must divide tensor_parallel_size=2 / 2 heads of keys"):
        resolve(tmp_path, model=pair, **DIVIDED)
    with pytest.raises(ConfigError, match=r"size=4 .* it must divide tensor_parallel_size=4 / 2 heads of keys"):
        resolve(tmp_path, model=pair, tensor_parallel_size=4, decode_context_parallel_size=4)
    assert resolve(tmp_path, model=pair, tensor_parallel_size=4, decode_context_parallel_size=2).world_size == 4
    latent = {"num_key_value_heads": 4, "kv_lora_rank": 16}
    assert resolve(tmp_path, model=latent, **DIVIDED).world_size == 2
    falcon = {"multi_query": True, "num_kv_heads": 4}  # as its checkpoints say
    assert resolve(tmp_path, model=falcon, **DIVIDED).world_size == 2


def test_two_names_of_how_many_tokens_a_rank_keeps_in_a_row(tmp_path: Path) -> None:
    assert resolve(tmp_path, **DIVIDED).cp_kv_cache_interleave_size == 1
    assert resolve(tmp_path, **DIVIDED, cp_kv_cache_interleave_size=4).cp_kv_cache_interleave_size == 4
    old = resolve(tmp_path, **DIVIDED, dcp_kv_cache_interleave_size=8, cp_kv_cache_interleave_size=4)
    assert old.cp_kv_cache_interleave_size == 8
    parallel = resolve(tmp_path, **DIVIDED)
    assert (parallel.world_size, parallel.dcp_comm_backend) == (2, "ag_rs")
    assert resolve(tmp_path, dcp_kv_cache_interleave_size=3).cp_kv_cache_interleave_size == 1  # nothing is divided


MIXTURE = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"tensor_parallel_size": 2}, ""),
        ({"data_parallel_rank": 1}, "several programs start them"),
        ({"pipeline_parallel_size": 2}, ""),
        ({"enable_lora": True}, ""),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "they draft"),
        ({"load_format": "sharded_state"}, "files of load_format 'sharded_state'"),
    ],
)
def test_whose_experts_are_divided_among_engines(
    options: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    more = dict(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, enable_expert_parallel=True, **options)
    parallel = EngineArgs(**more, data_parallel_size=2).create_engine_config().parallel_config
    assert parallel.experts_span_engines is (not said)
    assert ("divides experts among" in caplog.text) is bool(said) and said in caplog.text
    if "data_parallel_rank" not in options:
        assert not EngineArgs(**more).create_engine_config().parallel_config.experts_span_engines
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    parallel = EngineArgs(**more, data_parallel_size=2).create_engine_config().parallel_config
    assert not parallel.experts_span_engines and "has no experts to divide" in caplog.text


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_whole_experts_of_a_dense_model_are_one_line(
    sizes: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    resolve(tmp_path, enable_expert_parallel=True, **sizes)
    lines = [line for line in caplog.messages if "expert" in line]
    assert lines == ["enable_expert_parallel has no effect: a model of type 'llama' has no experts to divide"]


def test_whole_experts_of_one_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resolve(tmp_path, model=MIXTURE, enable_expert_parallel=True)
    assert "enable_expert_parallel has no effect: with tensor_parallel_size 1" in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"data_parallel_rank": 1}, "several programs start them"),
        ({"load_format": "sharded_state"}, "files of load_format 'sharded_state'"),
    ],
)
def test_experts_move_only_between_ranks_that_divide_them(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    options = dict(options, enable_expert_parallel=True, enable_eplb=True, data_parallel_size=2)
    with pytest.raises(NotBuiltError, match=f"enable_eplb: each engine has one rank with all experts.*{why}"):
        resolve(tmp_path, model=MIXTURE, **options)
    assert resolve(tmp_path, model=MIXTURE, tensor_parallel_size=2, **options).enable_eplb


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_cut_with_several_ranks(ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    args = EngineArgs(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, enable_lora=True, fully_sharded_loras=True,
        enable_expert_parallel=True, tensor_parallel_size=ranks,
    )  # fmt: skip
    config = args.create_engine_config()
    assert config.lora_config is not None and config.lora_config.fully_sharded_loras
    assert ("fully_sharded_loras has no effect: with tensor_parallel_size 1" in caplog.text) is (ranks == 1)


def test_stages_have_a_step_each_and_no_look_ahead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    for size, ahead in ((1, True), (3, True), (3, None)):
        args = EngineArgs(
            model=str(tmp_path), device="cpu", skip_tokenizer_init=True, pipeline_parallel_size=size,
            async_scheduling=ahead,
        )  # fmt: skip
        config = args.create_engine_config()
        assert config.max_concurrent_batches == (2 if size == 1 else 3)
        assert config.scheduler_config.async_scheduling is (size == 1)


def test_without_ray_one_worker_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.ranks.importlib.util.find_spec", lambda name: None)
    assert resolve(tmp_path, distributed_executor_backend="ray").distributed_executor_backend is None
    with pytest.raises(MissingExtraError, match=r"needs the package 'ray'.*quire-llm\[ray\]"):
        resolve(tmp_path, distributed_executor_backend="ray", tensor_parallel_size=2)


def test_with_ray_one_worker_may_be_an_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.ranks.importlib.util.find_spec", lambda name: object())
    for size in (1, 2):
        parallel = resolve(tmp_path, distributed_executor_backend="ray", tensor_parallel_size=size)
        assert parallel.distributed_executor_backend == "ray"
