"""How many workers a configuration asks for, and who starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.config.ranks import MOST_RANKS
from quire.schema.errors import ConfigError, NotBuiltError
from tests.plain.config.test_hints import LLAMA


def resolve(folder: Path, **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    args = EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, **options)
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
        ({"distributed_executor_backend": "ray"}, None),  # of no effect on one worker
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
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, NotBuiltError, "'ray' with tensor_par"),
        ({"distributed_executor_backend": "external_launcher"}, NotBuiltError, "external_launcher"),
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


def test_stages_have_a_step_each_and_no_look_ahead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for size, ahead in ((1, True), (3, True), (3, None)):
        args = EngineArgs(
            model=str(tmp_path), device="cpu", skip_tokenizer_init=True, pipeline_parallel_size=size,
            async_scheduling=ahead,
        )  # fmt: skip
        config = args.create_engine_config()
        assert config.max_concurrent_batches == (2 if size == 1 else 3)
        assert config.scheduler_config.async_scheduling is (size == 1)
