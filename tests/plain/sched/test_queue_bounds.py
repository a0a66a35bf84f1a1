"""What keeps a server from drowning or being probed: a bounded queue, and names of cached blocks nobody can compute."""

from __future__ import annotations

import json
import logging

import pytest

from quire.base import env
from quire.config import EngineArgs, UsageContext
from quire.config.extras import LoggingConfig
from quire.config.logs import apply_logging
from quire.sched.prefix_hash import BlockHasher
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import ConfigError, OverloadedError
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from tests.fake_engine import write_model
from tests.plain.sched.kit import Bench, request


def test_a_server_bounds_its_queue_and_a_batch_job_does_not(tmp_path):
    model = write_model(tmp_path)
    server = EngineArgs(model=model).create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config
    assert (server.max_num_queued_reqs, server.max_num_queued_tokens) == (10_000, 4 << 20)
    job = EngineArgs(model=model).create_engine_config(UsageContext.LLM_CLASS).scheduler_config
    assert job.max_num_queued_reqs is None and job.max_num_queued_tokens is None
    asked = EngineArgs(model=model, max_num_queued_reqs=0, max_num_queued_tokens=7)
    config = asked.create_engine_config(UsageContext.OPENAI_API_SERVER)
    settings = SchedulerSettings.from_config(config, max_model_len=512, depth=1)
    assert settings.max_num_queued is None and settings.max_num_queued_tokens == 7


def test_tokens_that_wait_are_counted_through_every_move():
    bench = Bench(64, max_model_len=100, max_num_queued_tokens=50, max_num_seqs=1)
    bench.add(request("runs", 60, 5))  # alone, it may be larger than the bound
    bench.step()
    bench.add(request("a", 30, 5))
    with pytest.raises(OverloadedError, match=r"30 prompt tokens are waiting, this request has 21") as full:
        bench.add(request("b", 21, 5))
    assert full.value.limit == "max_num_queued_tokens" and full.value.status == 503
    bench.add(request("c", 20, 5))
    bench.scheduler.abort(["a"])
    bench.add(request("d", 30, 5))
    while bench.scheduler.has_unfinished():
        bench.step()
    assert bench.scheduler.planner.waiting.num_tokens == 0


def names(seed: bytes) -> list[bytes]:
    found: list[bytes] = []
    given = EngineRequest(request_id="a", prompt_token_ids=(), params=ResolvedParams(), seed=0, max_tokens=1)
    BlockHasher("sha256", 4, seed).extend(found, list(range(8)), 8, given)
    return found


def test_names_of_blocks_hang_on_the_seed():
    assert names(b"one") == names(b"one") and not set(names(b"one")) & set(names(b"two"))


def test_every_engine_draws_its_own_seed_unless_one_is_fixed(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    env.forget_all()
    config = EngineArgs(model=write_model(tmp_path)).create_engine_config()
    drawn = [SchedulerSettings.from_config(config, max_model_len=512, depth=1).hash_seed for _ in range(2)]
    assert drawn[0] != drawn[1] and all(len(seed) == 32 for seed in drawn)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    env.forget_all()
    assert SchedulerSettings.from_config(config, max_model_len=512, depth=1).hash_seed == b"7"


def test_logging_options(tmp_path):
    quire = logging.getLogger("quire")
    before = quire.level
    try:
        apply_logging(LoggingConfig(log_level="error"))
        assert quire.level == logging.ERROR
        path = tmp_path / "l.json"
        path.write_text(json.dumps({"loggers": {"quire.some.room": {"level": "CRITICAL"}}}))
        apply_logging(LoggingConfig(log_config_file=str(path)))
        assert logging.getLogger("quire.some.room").level == logging.CRITICAL
    finally:
        quire.setLevel(before)
    with pytest.raises(ConfigError, match="cannot be used"):
        apply_logging(LoggingConfig(logging_config={"handlers": {"x": {"class": "no.such.Handler"}}}))
    with pytest.raises(ConfigError, match="cannot be read"):
        apply_logging(LoggingConfig(log_config_file=str(tmp_path / "none.json")))
