"""data_parallel_backend="ray" over a stand-in for Ray and the fake worker: engines start, answer and end, or it is said
why not. With Ray itself: test_ray.py."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.executor.ray_cluster import NodePlace, RayActor, RayCluster, share_of
from quire.schema.errors import EngineDeadError
from tests.fake_engine import use_fake, write_model
from tests.fake_ray import FakeRay


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    made.install(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "")  # an actor, which is this process here, is given it
    use_fake(monkeypatch)
    return made


def start(tmp_path: Path, **options: Any) -> LLM:
    return LLM(write_model(tmp_path / "model"), device="cpu", data_parallel_backend="ray", **options)


def test_engines_answer_and_everything_is_given_back(ray: FakeRay, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with start(tmp_path, data_parallel_size=3, data_parallel_size_local=1) as llm:
        assert ray.bundles == [{"CPU": 1.0, "node:127.0.0.1": 0.001}, {"CPU": 1.0}, {"CPU": 1.0}]
        assert [one["num_cpus"] for one in ray.options] == [1.0] * 3
        texts = [f"ab{number}" for number in range(9)]
        outputs = llm.generate(texts, SamplingParams(max_tokens=6), use_tqdm=False)
        assert [one.outputs[0].text for one in outputs] == [(text * 6)[:6] for text in texts]
        assert ray.is_up and not ray.killed
    assert not ray.is_up and ray.removed == 1 and len(ray.killed) == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_room(ray: FakeRay, tmp_path: Path) -> None:
    ray.rooms = 1
    with pytest.raises(
        EngineDeadError, match=r"Ray has no room for 2 engines of .'CPU': 1.0. each; it has .'CPU': 1.0."
    ):
        start(tmp_path, data_parallel_size=2)
    assert not ray.is_up and ray.removed == 1


def test_an_actor_that_cannot_run(ray: FakeRay, tmp_path: Path) -> None:
    """The start ends at once, with what Ray says of it."""
    ray.fail_at = lambda number: RuntimeError("the worker's\n  memory ran out") if number == 1 else None
    said = "engine 1, on Ray node node-1 .127.0.0.1.: its actor is gone, says Ray: the worker's memory ran out"
    with pytest.raises(EngineDeadError, match=said):
        start(tmp_path, data_parallel_size=2)
    assert not ray.is_up and ray.removed == 1


def test_an_actor_has_a_gpu_and_no_processor(ray: FakeRay) -> None:
    """Ray would ask for a processor of its own accord, and a bundle of GPUs has none."""
    RayCluster("x").make(RayActor, {"GPU": 2.0}, 1, what="engines")
    assert ray.bundles == [{"GPU": 2.0}]
    assert (ray.options[0]["num_cpus"], ray.options[0]["num_gpus"]) == (0, 2.0)


def test_what_ray_says_of_a_start_that_fails(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RayCluster, actors: Any) -> Any:
        raise TimeoutError("the nodes\n are not there")

    monkeypatch.setattr(RayCluster, "places", fail)
    with pytest.raises(EngineDeadError, match="data_parallel_backend='ray': TimeoutError: the nodes are not there"):
        start(tmp_path, data_parallel_size=2)
    assert not ray.is_up


def test_what_an_engine_has_of_its_node() -> None:
    places = [NodePlace("a", "10.0.0.1"), NodePlace("b", "10.0.0.2"), NodePlace("a", "10.0.0.1")]
    found = [tuple(share_of(places, number, "cpu").values()) for number in range(3)]
    assert found == [(0, 2), (0, 1), (1, 2)]
    assert tuple(share_of(places, 2, "cuda").values()) == (0, 1)
