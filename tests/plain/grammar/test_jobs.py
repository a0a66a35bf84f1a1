"""grammar/jobs.py: who is compiled next, who makes way, and who is let go because nobody waits any more."""

from __future__ import annotations

import threading

import pytest

from quire.grammar.jobs import CompileJob, Jobs
from quire.schema.errors import OverloadedError
from quire.schema.grammar import GrammarKind, GrammarSpec


def spec(name: str) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, text=name, backends=("guidance",))


def make_jobs(*names: str, num_workers: int = 2, most_queued: int = 100) -> Jobs:
    jobs = Jobs(num_workers=num_workers, most_queued=most_queued, first_seconds=1.0)
    for name in names:
        jobs.put(spec(name))
    return jobs


def take(jobs: Jobs) -> CompileJob:
    job = jobs.take()
    assert job is not None
    return job


def test_first_come_first_served_and_each_only_once() -> None:
    jobs = make_jobs("a", "b", "a", "c")
    assert [take(jobs).spec.text for _ in range(3)] == ["a", "b", "c"]
    jobs.put(spec("a"))  # runs
    assert len(jobs) == 3


def test_what_is_queued_and_dropped_is_never_taken() -> None:
    jobs = make_jobs("a", "b", "c")
    jobs.drop(spec("a"))
    jobs.drop(spec("b"))
    jobs.drop(spec("nobody's"))
    assert take(jobs).spec.text == "c" and len(jobs) == 1


def test_what_runs_and_is_dropped_must_stop_and_does_not_come_back() -> None:
    jobs = make_jobs("a")
    job = take(jobs)
    assert not jobs.must_stop(job, 100.0), "nobody else waits"
    jobs.drop(job.spec)
    assert jobs.must_stop(job, 0.0)
    jobs.give_back(job)
    assert len(jobs) == 0


def test_somebody_may_want_it_again_before_it_has_stopped() -> None:
    jobs = make_jobs("a")
    job = take(jobs)
    jobs.drop(job.spec)
    assert jobs.must_stop(job, 0.0)
    jobs.put(job.spec)
    jobs.give_back(job)  # the child was on its way out already
    assert take(jobs) is job and not job.dropped


def test_the_queue_is_bounded_and_those_under_way_are_not_refused() -> None:
    jobs = make_jobs("a", "b", most_queued=2)
    with pytest.raises(OverloadedError, match="2 constraints"):
        jobs.put(spec("c"))
    jobs.put(spec("b"))
    jobs.drop(spec("a"))
    jobs.put(spec("c"))
    assert take(jobs).spec.text == "b"
    jobs.put(spec("d"))


def test_a_long_one_makes_way_for_those_that_had_no_try() -> None:
    jobs = make_jobs("slow")
    slow = take(jobs)
    jobs.put(spec("quick"))
    assert not jobs.must_stop(slow, 0.5) and jobs.must_stop(slow, 1.5)
    jobs.give_back(slow)
    assert take(jobs).spec.text == "quick" and take(jobs) is slow
    jobs.put(spec("late"))
    assert not jobs.must_stop(slow, 9.0), "it made way once, and now has its full time"


def test_long_ones_leave_a_worker_to_the_new() -> None:
    jobs = make_jobs("s1", "s2", num_workers=2)
    for job in [take(jobs), take(jobs)]:
        jobs.give_back(job)
    assert take(jobs).is_long
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.append(take(jobs).spec.text))
    thread.start()
    thread.join(0.1)
    assert not taken, "the second worker took a long one too"
    jobs.put(spec("new"))
    thread.join(60.0)
    assert taken == ["new"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stream_of_new_ones_does_not_starve_a_long_one(num_workers: int) -> None:
    jobs = make_jobs("slow", num_workers=num_workers)
    jobs.give_back(take(jobs))
    seen = []
    for i in range(10):
        jobs.put(spec(f"new{i}"))
        jobs.put(spec(f"more{i}"))
        job = take(jobs)
        seen.append(job.spec.text)
        jobs.done(job)
    assert seen.count("slow") == 1


def test_closing_ends_whoever_waits() -> None:
    jobs = make_jobs()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(jobs.take()))
    thread.start()
    jobs.close()
    thread.join(60.0)
    assert found == [None]
