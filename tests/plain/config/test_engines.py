"""Which engines of a data-parallel deployment a program starts, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.config import EngineArgs
from quire.config.engines import config_of_engine
from quire.config.ranks import MOST_RANKS
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError
from tests.plain.config.test_hints import LLAMA


def resolve(folder: Path, *, headless: bool = False, model: dict[str, Any] | None = None, **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA | (model or {})))
    args = EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, **options)
    return args.create_engine_config(headless=headless)


@pytest.mark.parametrize(
    ("options", "ranks", "lb"),
    [
        ({}, [0], ""),
        ({"data_parallel_size": 3}, [0, 1, 2], ""),
        ({"data_parallel_size": 3, "data_parallel_size_local": 3}, [0, 1, 2], ""),
        ({"data_parallel_size": 3, "data_parallel_rank": 2}, [2], "external"),
        ({"data_parallel_size": 3, "data_parallel_rank": 0, "data_parallel_external_lb": True}, [0], "external"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, [2, 3], "hybrid"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, [0, 1], "hybrid"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, [0, 1], ""),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_start_rank": 3}, [3], "external"),
        ({"data_parallel_rank": 0}, [0], ""),
        ({"data_parallel_start_rank": 0}, [0], ""),
        ({"data_parallel_hybrid_lb": True}, [0], ""),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1}, [0], ""),
    ],
)
def test_which_engines_start_here(options: dict[str, Any], ranks: list[int], lb: str, tmp_path: Path) -> None:
    parallel = resolve(tmp_path, **options).parallel_config
    assert list(parallel.engine_ranks) == ranks and parallel.num_engines_here == len(ranks)
    assert (parallel.data_parallel_external_lb, parallel.data_parallel_hybrid_lb) == (lb == "external", lb == "hybrid")
    assert parallel.data_parallel_size == options.get("data_parallel_size", 1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, ConfigError, "must be below data_parallel_size=2"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, ConfigError, "is more than data_parallel_size=2"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_start_rank": 1}, ConfigError,
         "is a server without engines"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_rank": 1}, ConfigError, "one engine"),
        ({"data_parallel_size_local": 0, "nnodes": 2, "tensor_parallel_size": 2}, NotBuiltError, "nnodes=2 with data_"),
        ({"data_parallel_size": 2, "data_parallel_rpc_port": 65536}, ConfigError, "at most 65535"),
        ({"data_parallel_external_lb": True}, ConfigError, "needs data_parallel_size above 1"),
        ({"data_parallel_start_rank": 1}, ConfigError, "start_rank is 1; it must be below data_parallel_size=1"),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, ConfigError, "needs data_parallel_rank"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, ConfigError, "needs data_parallel_size_local"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "data_parallel_external_lb": True}, ConfigError,
         "exclude each other"),
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_size_local": 2}, ConfigError, "one engine"),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 3, "data_parallel_size_local": 2}, ConfigError,
         "beyond data_parallel_size=4"),
        ({"data_parallel_size": MOST_RANKS, "tensor_parallel_size": 2}, ConfigError, f"at most {MOST_RANKS} ranks"),
        ({"data_parallel_size": 2, "data_parallel_backend": "slurm"}, ConfigError, "mp"),
        ({"data_parallel_size": 2, "data_parallel_routing": "best"}, ConfigError, "least-loaded"),
        ({"data_parallel_size": 2, "data_parallel_multi_port_external_lb": True}, NotBuiltError, "started once"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        resolve(tmp_path, **options)


def test_hybrid_balancing_of_one_engine_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resolve(tmp_path, data_parallel_hybrid_lb=True)
    assert "data_parallel_hybrid_lb has no effect: with data_parallel_size 1 there is one engine" in caplog.text


@pytest.mark.parametrize(
    ("options", "headless", "is_told"),
    [
        ({}, False, True),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, False, True),
        ({"data_parallel_size_local": 0}, False, True),
        ({"data_parallel_routing": "least-loaded"}, False, False),
        ({"data_parallel_size": 2}, False, False),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, False, False),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, True, False),
    ],
)
def test_routing_to_one_engine_is_told_once(
    options: dict[str, Any],
    headless: bool,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.base.log._logged", set())
    caplog.set_level("INFO")
    for _ in range(2):
        resolve(tmp_path, headless=headless, **{"data_parallel_routing": "prefix-aware"} | options)
    assert caplog.text.count("data_parallel_routing='prefix-aware' has no effect") == is_told


@pytest.mark.parametrize(
    ("options", "headless", "here", "all_of_them"),
    [
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, False, [0, 1], [0, 1, 2, 3]),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, False, [], [0, 1]),
        ({"data_parallel_size_local": 0}, False, [], [0]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, True, [2, 3], [2, 3]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_start_rank": 3}, True, [3], [3]),
        ({"data_parallel_size": 4}, True, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({}, True, [0], [0]),
    ],
)
def test_engines_of_several_machines(
    options: dict[str, Any], headless: bool, here: list[int], all_of_them: list[int], tmp_path: Path
) -> None:
    parallel = resolve(tmp_path, headless=headless, **options).parallel_config
    assert list(parallel.ranks_here) == here and list(parallel.engine_ranks) == all_of_them
    assert parallel.num_engines_here == len(here) and not parallel.data_parallel_hybrid_lb
    assert parallel.has_several_engines == (len(all_of_them) > 1 or here != all_of_them)
    assert (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port) == ("127.0.0.1", 29550)


@pytest.mark.parametrize(
    ("node", "headless", "options", "here", "all_of_them"),
    [
        (0, False, {}, [0, 1], [0, 1, 2, 3]),
        (0, False, {"data_parallel_size_local": 2, "tensor_parallel_size": 2}, [0, 1], [0, 1, 2, 3]),
        (1, True, {}, [2, 3], [2, 3]),
        (1, True, {"data_parallel_start_rank": 2}, [2, 3], [2, 3]),
        (1, False, {"data_parallel_hybrid_lb": True}, [2, 3], [2, 3]),
        (1, False, {"data_parallel_size": 2, "data_parallel_external_lb": True}, [1], [1]),
        (1, False, {"data_parallel_rank": 3}, [3], [3]),
    ],
)
def test_nodes_with_whole_engines(
    node: int, headless: bool, options: dict[str, Any], here: list[int], all_of_them: list[int], tmp_path: Path
) -> None:
    """nnodes and node_rank say what data_parallel_size_local and data_parallel_start_rank would."""
    options = {"data_parallel_size": 4, "nnodes": 2, "node_rank": node, "master_addr": "10.0.0.9"} | options
    parallel = resolve(tmp_path, headless=headless, **options).parallel_config
    assert (list(parallel.ranks_here), list(parallel.engine_ranks)) == (here, all_of_them)
    assert (parallel.nnodes, parallel.data_parallel_master_ip) == (1, "10.0.0.9")
    assert parallel.local_world_size == options.get("tensor_parallel_size", 1)


@pytest.mark.parametrize(
    ("options", "headless", "said"),
    [
        ({"node_rank": 1}, False, "node_rank is 1: the first of nnodes=2 machines has the server"),
        ({}, True, "node_rank is 0: the first of nnodes=2 machines has the server"),
        ({"data_parallel_size_local": 1}, False, "data_parallel_size_local=1, but nnodes=2 and node_rank=0 mean 2"),
        ({"node_rank": 1, "data_parallel_start_rank": 1}, True, "node_rank=1 mean 2: leave it out"),
        ({"data_parallel_external_lb": True}, False, "data_parallel_external_lb needs data_parallel_rank"),
        ({"data_parallel_rank": 2}, False, "data_parallel_rank=2, but node_rank=0 of nnodes=2 has 0 to 1"),
        (
            {"node_rank": 1, "data_parallel_rank": 0},
            False,
            "data_parallel_rank=0, but node_rank=1 of nnodes=2 has 2 to 3",
        ),
    ],
)
def test_nodes_with_whole_engines_that_do_not_fit(
    options: dict[str, Any], headless: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path, headless=headless, data_parallel_size=4, nnodes=2, **options)


def with_ray(monkeypatch: pytest.MonkeyPatch, *, installed: bool = True) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object() if installed else None)


@pytest.mark.parametrize(("options", "near"), [({}, 0), ({"data_parallel_size_local": 2}, 2)])
def test_engines_that_ray_starts(
    options: dict[str, Any], near: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ray(monkeypatch)
    parallel = resolve(tmp_path, data_parallel_size=3, data_parallel_backend="ray", **options).parallel_config
    assert (list(parallel.ranks_here), list(parallel.engine_ranks)) == ([], [0, 1, 2])
    assert (parallel.num_engines_near, parallel.has_several_engines) == (near, True)


def test_one_engine_needs_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, installed=False)
    assert list(resolve(tmp_path, data_parallel_backend="ray").parallel_config.ranks_here) == [0]
    with pytest.raises(MissingExtraError, match="data_parallel_backend='ray'"):
        resolve(tmp_path, data_parallel_backend="ray", data_parallel_size=2)


@pytest.mark.parametrize(
    ("other", "options"),
    [
        ("nnodes", {"nnodes": 2}),
        ("data_parallel_rank", {"data_parallel_rank": 0}),
        ("data_parallel_start_rank", {"data_parallel_start_rank": 0}),
        ("data_parallel_hybrid_lb", {"data_parallel_hybrid_lb": True}),
        ("external_launcher", {"distributed_executor_backend": "external_launcher"}),
        ("headless", {}),
    ],
)
def test_what_ray_does_not_go_with(
    other: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ray(monkeypatch)
    with pytest.raises(ConfigError, match=f"data_parallel_backend='ray' and {other} exclude each other"):
        resolve(tmp_path, headless=other == "headless", data_parallel_size=2, data_parallel_backend="ray", **options)


def test_where_the_server_waits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 1, "master_addr": "10.0.0.9"}
    assert resolve(tmp_path, **options).parallel_config.data_parallel_master_ip == "10.0.0.9"
    options |= {"data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 13345}
    parallel = resolve(tmp_path, **options).parallel_config
    assert (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port) == ("10.0.0.1", 13345)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb and headless exclude each other"),
        ({"data_parallel_rank": 1}, "data_parallel_rank and headless exclude each other"),
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb and headless exclude each other"),
        ({"data_parallel_size_local": 0}, "nothing to start"),
        ({"data_parallel_start_rank": 3, "data_parallel_size_local": 2}, "beyond data_parallel_size=4"),
        ({"data_parallel_start_rank": 1}, "beyond data_parallel_size=4"),
    ],
)
def test_what_is_refused_without_a_server(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path, headless=True, data_parallel_size=4, **options)


def test_experts_are_not_shared_across_machines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    both: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "model": mixture}
    assert resolve(tmp_path, **both).parallel_config.experts_span_engines
    for headless, options in ((False, {"data_parallel_size_local": 1}), (True, {})):
        caplog.clear()
        assert not resolve(tmp_path, headless=headless, **both, **options).parallel_config.experts_span_engines
        assert "not among engines" in caplog.text


def test_a_program_per_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documented program does it: the variables are set before an LLM is built."""
    variables = {"SIZE": "4", "RANK": "3", "RANK_LOCAL": "1", "MASTER_IP": "127.0.0.1", "MASTER_PORT": "4711"}
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_DP_{name}", value)
    env.forget_all()
    parallel = resolve(tmp_path).parallel_config
    assert (parallel.data_parallel_size, parallel.data_parallel_rank, parallel.data_parallel_size_local) == (4, 3, 1)
    assert (parallel.place_here, parallel.num_engines_here) == (1, 4)
    assert resolve(tmp_path, data_parallel_size=2).parallel_config.data_parallel_size == 2  # an option goes first
    monkeypatch.setenv("VLLM_DP_RANK", "4")
    env.forget_all()
    with pytest.raises(ConfigError, match="VLLM_DP_RANK is 4; it must be from 0 to 3"):
        resolve(tmp_path)


def test_every_engine_has_a_place_of_its_own(tmp_path: Path) -> None:
    config = resolve(tmp_path, data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    engines = [config_of_engine(config, place).parallel_config for place in range(2)]
    assert [(one.data_parallel_rank, one.place_here, one.num_engines_here) for one in engines] == [(2, 0, 2), (3, 1, 2)]
