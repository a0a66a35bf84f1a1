"""observe/cells.py: rows of several processes, added up, whatever becomes of their owners."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from quire.observe.cells import Cells, LeaderLock
from quire.observe.metrics import Metrics
from quire.observe.reader import Counter, Gauge, Histogram
from quire.schema.stats import StepStats

# A process that counts, says so, and waits to be killed.
OTHER = """
import sys, time
from quire.observe.metrics import Metrics
from quire.observe.cells import LeaderLock
from quire.schema.stats import StepStats
metrics = Metrics("tiny", 64, folder=sys.argv[1])
metrics.prompt_done(7, 3)
metrics.token_times(first=0.3, gaps=[0.2])
metrics.step(StepStats(step=1, running=5, waiting=6, prompt_tokens=4, generated_tokens=2, preempted=1, kv_usage=0.5))
print("turn" if LeaderLock(sys.argv[1], "log").mine() else "no turn", flush=True)
time.sleep(600)
"""


def read(metrics: Metrics) -> dict[str, object]:
    found: dict[str, object] = {}
    for metric in metrics.snapshot():
        key = metric.name + "".join(f" {v}" for k, v in metric.labels.items() if k not in ("model_name", "engine"))
        if isinstance(metric, Counter | Gauge):
            found[key] = metric.value
        elif isinstance(metric, Histogram):
            found[key] = (metric.count, round(metric.sum, 6))
    return found


def test_a_killed_process_stays_counted(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ours = Metrics("tiny", 64, folder=folder)
    ours.prompt_done(2, 0)
    ours.token_times(first=0.3)
    child = subprocess.Popen([sys.executable, "-c", OTHER, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "turn\n"
        assert not LeaderLock(folder, "log").mine()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert LeaderLock(folder, "log").mine(), "a dead process keeps no turn"
    found = read(ours)
    assert found["vllm:prompt_tokens"] == 9
    assert found["vllm:prompt_tokens_by_source local_cache_hit"] == 3
    assert found["vllm:time_to_first_token_seconds"] == (2, 0.6)
    assert found["vllm:inter_token_latency_seconds"] == (1, 0.2)
    assert found["vllm:generation_tokens"] == 2
    assert found["vllm:num_requests_running"] == 5, "the last one who heard of a step knows"
    ours.step(StepStats(step=2, running=1, waiting=0, prompt_tokens=0, generated_tokens=1, preempted=0, kv_usage=0.25))
    found = read(ours)
    assert found["vllm:num_requests_running"] == 1 and found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:generation_tokens"] == 3 and found["vllm:num_preemptions"] == 1


def test_a_process_that_only_begins_knows_less(tmp_path: Path) -> None:
    ours = Metrics("tiny", 64, folder=str(tmp_path))
    ours.step(StepStats(step=1, running=4, waiting=2, prompt_tokens=0, generated_tokens=1, preempted=0, kv_usage=0.5))
    fresh = Metrics("tiny", 64, folder=str(tmp_path))
    for metrics in (ours, fresh):
        found = read(metrics)
        assert found["vllm:num_requests_running"] == 4 and found["vllm:engine_sleep_state awake"] == 1


def test_files_are_private_and_appear_whole(tmp_path: Path) -> None:
    cells = Cells(3, kind="a", meaning="m", folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    cells.mine[2] = 4.5
    other = Cells(3, kind="a", meaning="m", folder=str(tmp_path))
    assert [row[2] for row in other.rows()] == [0.0, 4.5]
    cells.mine[2] += 1
    assert [row[2] for row in other.rows()] == [0.0, 5.5], "seen at once"


def test_rows_of_another_meaning_are_left_out(tmp_path: Path) -> None:
    folder = str(tmp_path)
    Cells(3, kind="a", meaning="another", folder=folder)
    Cells(2, kind="a", meaning="m", folder=folder)
    Cells(3, kind="b", meaning="m", folder=folder)
    (tmp_path / "a-1-x.cells").write_bytes(b"short")
    mine = Cells(3, kind="a", meaning="m", folder=folder)
    assert len(mine.rows()) == 1 and len(mine.rows()) == 1


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: object) -> None:
    before = set(os.listdir(tmp_path))
    cells = Cells(2, kind="a", meaning="m")
    cells.mine[1] = 2.0
    assert [list(row) for row in cells.rows()] == [[0.0, 2.0]]
    assert set(os.listdir(tmp_path)) == before
    assert LeaderLock(None, "log").mine()
