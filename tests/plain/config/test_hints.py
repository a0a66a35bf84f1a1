"""Options that tune another engine are taken and named in one line of the log; what would change answers is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base import log
from quire.cli.serve import make_parser
from quire.config import EngineArgs
from quire.schema.errors import ConfigError, NotBuiltError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
HINTS = [
    (["--moe-backend", "triton"], "moe_backend='triton'"),
    (["--performance-mode", "throughput"], "performance_mode='throughput'"),
    (["-cc", "3"], "compilation_config.mode=3"),
    (["-cc.pass_config.enable_sp", "true"], "compilation_config.pass_config.enable_sp=True"),
    (["-cc.backend=inductor"], "compilation_config.backend='inductor'"),
    (["--mm-processor-device", "cpu"], "mm_processor_device='cpu'"),
    (["--mm-tensor-ipc", "torch_shm"], "mm_tensor_ipc='torch_shm'"),
    (["--attention-backend", "FLASH_ATTN"], "attention_backend='FLASH_ATTN'"),
    (["--all2all-backend", "deepep_low_latency"], "all2all_backend='deepep_low_latency'"),
    (["--safetensors-load-strategy", "prefetch"], "safetensors_load_strategy='prefetch'"),
    (["--disable-custom-all-reduce"], "disable_custom_all_reduce=True"),
    (["--swap-space", "8"], "swap_space=8.0"),
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(log, "_logged", set())
    return caplog


def start(tmp_path: Path, *flags: str) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    args = make_parser("quire serve").parse_args([str(tmp_path), "--device", "cpu", *flags])
    args.model = args.model_tag
    return EngineArgs.from_cli_args(args).create_engine_config()


def lines(told: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in told.records if "have no effect:" in r.getMessage() and "Options" in r.message]


@pytest.mark.parametrize(("flags", "named"), HINTS, ids=lambda value: str(value))
def test_a_hint_does_not_stop_a_start(
    tmp_path: Path, told: pytest.LogCaptureFixture, flags: list[str], named: str
) -> None:
    config = start(tmp_path, *flags)
    assert config.parallel_config.distributed_executor_backend is None and config.attention_config.backend is None
    (line,) = lines(told)
    place = line.index(f"{named} (")
    assert len(line) > place + len(named) + 10  # the reason


def test_all_hints_are_in_one_line(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "--moe-backend", "triton", "-cc", "3", "--mm-processor-device", "cpu")
    (line,) = lines(told)
    assert line.count(" (") == 3


def test_nothing_is_said_of_defaults_and_of_what_holds(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "--distributed-executor-backend", "uni", "--attention-backend", "CPU_ATTN", "-cc", "0",
          "--moe-backend", "auto", "--max-num-seqs", "4")  # fmt: skip
    assert lines(told) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill-context-parallel-size", "2"], ["--quantization", "experts_int8"], ["--kv-cache-dtype", "nvfp4"],
        ["--enable-moe-shared-loras"], ["--runner", "draft"],
        ["--speculative-config", '{"method": "dflash", "num_speculative_tokens": 2}'],
        ["-ac.use_non_causal", "true"], ["--use-fp64-gumbel"], ["--enable-sleep-mode"],
        ["--ray-workers-use-nsight"], ["--attention-backend", "FLASH_ATN"],
    ],
    ids=str,
)  # fmt: skip
def test_what_would_change_answers_is_refused(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(NotBuiltError, match=flags[0].strip("-").replace("-", "_").replace("ac.", "attention_config.")):
        start(tmp_path, *flags)


def test_bad_values_of_hints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mm_processor_cache_gb"):
        start(tmp_path, "--mm-processor-cache-gb", "-1")
    with pytest.raises(ConfigError, match="distributed_executor_backend"):
        start(tmp_path, "--distributed-executor-backend", "mpp")


def test_another_scheduler_is_let_through(tmp_path: Path) -> None:
    config = start(tmp_path, "--scheduler-cls", "quire.sched.scheduler:Scheduler")
    assert config.scheduler_config.scheduler_cls == "quire.sched.scheduler:Scheduler"
