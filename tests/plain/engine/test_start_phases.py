"""An engine says where the seconds of its start went: its own phases add up, and a worker's lie inside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quire.base import clock
from quire.base.clock import Laps
from quire.config import EngineArgs
from quire.engine import start
from tests.fake_engine import FakeExecutor, use_fake, write_model


def test_laps_are_what_passed_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 100.0
    monkeypatch.setattr(clock, "now", lambda: at)
    laps = Laps()
    at += 2
    laps.mark("a")
    at += 1  # nobody's: the stretch around the next begins now
    with laps.inside("outer"):
        at += 3
        laps.mark("b")
        laps.mark("c")
        at += 5
    at += 0.5
    laps.mark("d")
    assert laps.taken == [("a", 2.0, ""), ("b", 3.0, "outer"), ("c", 0.0, "outer"), ("d", 0.5, "")]


@pytest.mark.parametrize("measures", [True, False])
def test_an_engine_reports_its_phases(measures: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Executor(FakeExecutor):
        def warm_up(self) -> None:
            time.sleep(0.02)

        def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
            if verb == "start_laps" and measures:
                return [[("build", 0.25, "load"), ("weights", 0.5, "load"), ("graphs", 0.125, "warm_up")]]
            return super().call(verb, args, kwargs, timeout)

    use_fake(monkeypatch)
    monkeypatch.setattr(start, "make_executor", Executor)
    args = EngineArgs(model=write_model(tmp_path), max_model_len=64, max_num_seqs=4)
    ready = start.start_engine(args.create_engine_config()).ready
    outer = [phase for phase in ready.phases if not phase.inside]
    assert [phase.name for phase in outer] == ["device", "load", "profile", "kv", "warm_up"]
    assert ready.start_seconds.keys() == {"device", "load", "profile", "kv", "warm_up", "total"}
    assert sum(phase.seconds for phase in outer) <= ready.start_seconds["total"] + 1e-6
    assert next(phase for phase in outer if phase.name == "warm_up").seconds >= 0.02
    inner = [(phase.name, phase.seconds, phase.inside) for phase in ready.phases if phase.inside]
    wanted = [("build", 0.25, "load"), ("weights", 0.5, "load"), ("graphs", 0.125, "warm_up")]
    assert inner == (wanted if measures else [])
    if measures:
        assert "load" in start._told(ready.phases) and "(build 0.25, weights 0.50)" in start._told(ready.phases)
