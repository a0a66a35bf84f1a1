"""Loads: traces are checked line by line, draws repeat, and a part of a fleet sees its part of a load."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import mean, pvariance
from typing import Any

import pytest

from quire.schema.errors import InputError
from quire.simulate import workload as module
from quire.simulate.workload import FleetShare, SimulatedRequest, Workload, read_trace, thin

ALONE = FleetShare(1, 1, False)
LINE = {"arrival": 1.5, "prompt_tokens": 10, "output_tokens": 3}


def trace(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    group = {"prefix_group": "a", "prefix_tokens": 4}
    path = trace(tmp_path, LINE, "", LINE | {"arrival": 0} | group, LINE | group, LINE | {"prefix_group": 7})
    one = SimulatedRequest(1.5, 10, 3)
    assert read_trace(path) == [
        SimulatedRequest(0, 10, 3, 0, 4), one, one._replace(group=0, prefix_tokens=4),
        one._replace(group=1, prefix_tokens=10),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2"),
        ('{"arrival": 0}', "line 2.*prompt_tokens"),
        (LINE | {"arrival": -1}, "line 2: arrival must be between 0"),
        ('{"arrival": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "line 2"),
        (LINE | {"prompt_tokens": 0}, "line 2: prompt_tokens must be between 1"),
        (LINE | {"output_tokens": 10**12}, "line 2: output_tokens must be between 1"),
        (LINE | {"prompt_tokens": 1.5}, "line 2"),
        (LINE | {"prefix_group": "a", "prefix_tokens": 11}, "prefix_tokens=11 is not within the prompt's 10"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_trace(trace(tmp_path, LINE, line))


def test_traces_that_are_missing_empty_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InputError, match="holds no request"):
        read_trace(trace(tmp_path, ""))
    monkeypatch.setattr(module, "MOST_LINES", 1)
    with pytest.raises(InputError, match="at most 1 lines"):
        read_trace(trace(tmp_path, LINE, LINE))
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(InputError, match="bytes; at most 10 are read"):
        read_trace(trace(tmp_path, LINE))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rate": 0}, "--request-rate must be above 0"),
        ({"rate": math.nan}, "--request-rate must be above 0"),
        ({"burstiness": -1}, "--burstiness must be above 0"),
        ({"input_len": 0}, "--input-len must be between 1"),
        ({"output_len": 10**9}, "--output-len must be between 1"),
        ({"prefix_len": -1}, "--prefix-len must be between 0"),
        ({"num_prefixes": 0}, "--num-prefixes must be between 1"),
        ({"range_ratio": 1.0}, "--range-ratio must be in"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Workload(**options)


def test_draws_repeat_and_keep_their_bounds() -> None:
    load = Workload(rate=10, input_len=100, output_len=50, range_ratio=0.5, prefix_len=20, num_prefixes=3, seed=5)
    requests = load.draw(500, ALONE)
    assert requests == load.draw(500, ALONE) and requests[-1].arrival == pytest.approx(50)
    assert {r.group for r in requests} == {0, 1, 2} and {r.prefix_tokens for r in requests} == {20}
    assert all(70 <= r.prompt_tokens <= 170 and 25 <= r.output_tokens <= 75 for r in requests)
    assert load.longest >= max(r.prompt_tokens + r.output_tokens for r in requests)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
@pytest.mark.parametrize("in_turn", [True, False])
def test_arrivals_at_a_part_of_a_fleet_are_those_of_the_whole(burstiness: float, in_turn: bool) -> None:
    """Rate and variance of the gaps at one replica of eight, against those of a whole load that is divided."""
    load = Workload(rate=80, burstiness=burstiness)
    part = FleetShare(1, 8, in_turn)
    drawn = [r.arrival for r in load.draw(3000, part)]
    divided = [r.arrival for r in thin(load.draw(24_000, FleetShare(8, 8, in_turn)), part)]
    for times in (drawn, divided):
        assert len(times) / times[-1] == pytest.approx(10, rel=0.05)
    first, second = ([b - a for a, b in itertools.pairwise(times)] for times in (drawn, divided))
    variation = [pvariance(gaps) / mean(gaps) ** 2 for gaps in (first, second)]
    assert variation[0] == pytest.approx(variation[1], rel=0.2, abs=1e-6)


def test_groups_go_whole_to_a_part_of_a_fleet() -> None:
    requests = [SimulatedRequest(i, 10, 1, i % 100, 5) for i in range(2000)]
    seen = thin(requests, FleetShare(2, 8, False))
    by_group = [sum(r.group == group for r in seen) for group in range(100)]
    assert set(by_group) == {0, 20} and 10 <= by_group.count(20) <= 40
