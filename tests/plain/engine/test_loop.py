"""engine/loop.py and control.py over the real scheduler and a worker that repeats its prompt."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from quire.engine.control import VERBS
from quire.engine.loop import EngineLoop
from quire.sched.gates import Hold
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema import errors
from quire.schema.errors import kind_of, message_of, rebuild_error
from quire.schema.messages import Abort, ControlCall, ControlReply, EngineRequest, FinishReason, Outputs, Stop
from quire.schema.params import ResolvedParams
from tests.fake_engine import EOS, FakeExecutor, double, ids_of, name_of_model


def make_loop(
    ahead: int = 0, num_blocks: int = 64, executor: type[FakeExecutor] = FakeExecutor, **settings
) -> EngineLoop:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=4), additional_config={})
    fake = executor(config)
    layout = place(fake.load().specs, 0, num_blocks=num_blocks, max_model_len=100, max_num_seqs=8)
    values = dict(max_model_len=100, max_num_batched_tokens=16, max_num_seqs=8, depth=ahead + 1) | settings
    return EngineLoop(fake, Scheduler(SchedulerSettings(**values), layout))


def request(name: str, text: str = "abcde", max_tokens: int = 6, **params) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(ids_of(text)),
        params=ResolvedParams(max_tokens=max_tokens, **params),
        seed=0,
        max_tokens=max_tokens,
        eos_token_id=EOS,
    )


def run(loop: EngineLoop, most: int = 500) -> dict[str, tuple[list[int], FinishReason | None]]:
    found: dict[str, tuple[list[int], FinishReason | None]] = {}
    for _ in range(most):
        for output in loop.step():
            ids, _ = found.get(output.request_id, ([], None))
            found[output.request_id] = (ids + output.new_token_ids, output.finish_reason)
        if loop.is_drained():
            return found
    raise AssertionError(f"still busy after {most} steps")


def call(loop: EngineLoop, verb: str, *args, **kwargs) -> ControlReply | None:
    return loop.call(ControlCall(call_id=5, verb=verb, args=list(args), kwargs=kwargs))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 26])  # the second preempts
def test_every_request_gets_its_answer(ahead, num_blocks):
    loop = make_loop(ahead, num_blocks)
    texts = {f"r{i}": "xyzabcdefghijklm"[: 3 + 2 * i % 13] * 2 for i in range(12)}
    for name, text in texts.items():
        loop.submit(request(name, text, max_tokens=20))
    found = run(loop)
    for name, text in texts.items():
        want = (ids_of(text) * 20)[:20]
        assert found[name] == (want, FinishReason.LENGTH)
    assert loop.scheduler.kv.pool.num_free == num_blocks
    loop.scheduler.audit()


def test_end_of_text_and_late_stop():
    for ahead in (0, 1):
        loop = make_loop(ahead)
        loop.submit(request("a", extra_args={"eos_at": 3}))
        assert run(loop) == {"a": ([*ids_of("ab"), EOS], FinishReason.STOP)}


def test_all_are_aborted_in_the_order_in_which_they_came():
    """Ranks with an engine each must free blocks in the same order; hashes of names differ between processes."""
    for abort in (lambda loop: call(loop, "pause"), lambda loop: call(loop, "abort_requests")):
        loop, names = make_loop(max_num_seqs=4), [f"request {number}" for number in range(30)]
        for name in names:
            loop.submit(request(name))
        loop.step()
        abort(loop)
        ended = [output.request_id for output in loop.step() if output.finish_reason is FinishReason.ABORT]
        assert ended == names


def test_what_was_given_back_comes_before_what_happened_since():
    loop = make_loop(max_num_queued=1)
    loop.submit(request("a", "abcdef", max_tokens=4))
    first, second = loop.step(), loop.step()
    loop.keep(second)
    loop.keep(first)
    assert loop.step()[:2] == [*first, *second]
    loop.submit(request("b"))
    loop.submit(request("one too many"))  # refused at once: news that no step has returned yet
    loop.keep(first)
    kept = loop.step()
    assert kept[0] is first[0] and [output.request_id for output in kept[1:]].count("one too many") == 1


class Recorder(FakeExecutor):
    """Says when a step is started and when its result is read."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.events: list[str] = []

    def forward(self, plan) -> None:
        self.events.append(f"forward {plan.step}")
        super().forward(plan)

    def sample(self, step, mask):
        pending, events = super().sample(step, mask), self.events
        events.append(f"sample {self.plan.step}")
        step = self.plan.step

        class Watched:
            def result(self):
                events.append(f"result {step}")
                return pending.result()

        return Watched()


def test_look_ahead_reads_a_result_while_the_next_step_runs():
    loop = make_loop(1, executor=Recorder)
    loop.submit(request("a", max_tokens=4))
    run(loop)
    assert loop.executor.events[:7] == [
        "forward 1", "sample 1", "forward 2", "result 1", "sample 2", "forward 3", "result 2",
    ]  # fmt: skip
    loop = make_loop(0, executor=Recorder)
    loop.submit(request("a", max_tokens=4))
    run(loop)
    assert loop.executor.events[:4] == ["forward 1", "sample 1", "result 1", "forward 2"]


def test_depth_without_overlap_waits_for_the_oldest_step_only():
    loop = make_loop(2, executor=Recorder, overlap=1, max_num_batched_tokens=5)
    loop.submit(request("a", max_tokens=3))
    loop.submit(request("b", max_tokens=3))
    assert {name: ids for name, (ids, _) in run(loop).items()} == {"a": ids_of("abc"), "b": ids_of("abc")}
    assert loop.executor.events[:8] == [
        "forward 1", "sample 1", "forward 2", "sample 2", "result 1", "forward 4", "sample 4", "result 2",
    ]  # fmt: skip


def test_a_refused_request_is_news_and_others_go_on():
    loop = make_loop(max_num_queued=1)
    loop.submit(request("fine"))
    loop.submit(request("one too many"))
    news = loop.step()
    assert news[0].request_id == "one too many" and news[0].finish_reason is FinishReason.ERROR
    assert news[0].error_kind == "OverloadedError" and "max_num_queued_reqs=1" in news[0].error
    assert run(loop)["fine"][1] is FinishReason.LENGTH


def test_one_request_fails_alone():
    loop = make_loop()
    loop.submit(request("bad", extra_args={"fail_at": 2}))
    loop.submit(request("good"))
    found = run(loop)
    assert found["bad"][1] is FinishReason.ERROR and found["good"][1] is FinishReason.LENGTH


def test_an_exception_in_a_step_is_not_swallowed():
    loop = make_loop()
    loop.submit(request("a", extra_args={"raise_at": 2}))
    with pytest.raises(ArithmeticError):
        run(loop)


def test_a_stall_is_an_error_not_a_spin():
    loop = make_loop()
    loop.submit(request("a"))
    loop.scheduler.plan = lambda: SimpleNamespace(grants=())
    with pytest.raises(RuntimeError, match="1 waiting"):
        run(loop, most=5000)


@pytest.mark.parametrize("ahead", [0, 1])
def test_abort_frees_the_blocks_at_once(ahead):
    loop = make_loop(ahead)
    loop.submit(request("a", max_tokens=50))
    loop.submit(request("b"))
    for _ in range(4):
        loop.step()
    held = 64 - loop.scheduler.kv.pool.num_free
    loop.abort(["a", "unknown"])
    assert 64 - loop.scheduler.kv.pool.num_free < held
    found = run(loop)
    assert found["a"][1] is FinishReason.ABORT and found["b"][1] is FinishReason.LENGTH


def test_stats_count_what_happened():
    loop = make_loop(1)
    loop.submit(request("a", max_tokens=5))
    stats = []
    while loop.busy:
        loop.step()
        if (taken := loop.take_stats()) is not None:
            stats.append(taken)
    assert sum(s.prompt_tokens for s in stats) == 5
    assert sum(s.generated_tokens for s in stats) == 5
    assert loop.take_stats() is None


# ---- verbs


def test_a_step_that_fails_under_a_verb_is_the_engines_failure():
    class Failing(FakeExecutor):
        def sample(self, step, mask):
            super().sample(step, mask)
            return SimpleNamespace(result=lambda: 1 / 0)

    loop = make_loop(1, executor=Failing)
    loop.submit(request("a"))
    loop.step()
    with pytest.raises(ZeroDivisionError):
        call(loop, "is_paused")


def test_pause_holds_new_requests_and_aborts_running_ones():
    loop = make_loop(1)
    loop.submit(request("a", max_tokens=50))
    loop.step()
    assert call(loop, "pause") is None
    news = loop.step()
    assert [(o.request_id, o.finish_reason) for o in news if o.finish_reason] == [("a", FinishReason.ABORT)]
    assert loop.take_replies()[0].error is None
    loop.submit(request("b"))
    loop.submit(request("c"))
    loop.abort(["c"])
    assert [o.finish_reason for o in loop.step()] == [FinishReason.ABORT]
    assert call(loop, "is_paused").value is True and not loop.busy
    call(loop, "resume")
    assert run(loop)["b"][1] is FinishReason.LENGTH


def test_pause_can_wait_for_running_requests():
    loop = make_loop()
    loop.submit(request("a", max_tokens=8))
    loop.step()
    assert call(loop, "pause", wait_for_inflight_requests=True) is None
    loop.submit(request("b"))
    assert not loop.take_replies()
    assert run(loop)["a"][1] is FinishReason.LENGTH
    assert [reply.value for reply in loop.take_replies()] == [True]  # the cache was cleared


@pytest.mark.parametrize("ahead", [0, 1])
def test_reset_prefix_cache(ahead):
    loop = make_loop(ahead)
    text = "abcdefghijkl"
    loop.submit(request("a", text, max_tokens=30))
    for _ in range(5):
        loop.step()
    assert call(loop, "reset_prefix_cache").value is False  # the running request holds blocks
    assert call(loop, "reset_prefix_cache", True).value is True
    assert run(loop)["a"][0][-1] == (ids_of(text) * 3)[29]
    loop.submit(request("again", text))
    cached = [o.num_cached_tokens for _ in range(10) for o in loop.step()]
    assert max(cached) > 0
    assert call(loop, "reset_prefix_cache").value is True
    loop.submit(request("cold", text))
    cached = [o.num_cached_tokens for _ in range(10) for o in loop.step()]
    assert cached and max(cached) == 0


def test_collective_rpc_and_apply_model():
    loop = make_loop()
    assert call(loop, "collective_rpc", "num_rows").value == [0]
    assert call(loop, "collective_rpc", double, None, [21]).value == [42]
    assert call(loop, "collective_rpc", "tests.fake_engine:double", None, [4]).value == [8]
    assert call(loop, "apply_model", name_of_model).value == ["repeats its prompt"]
    assert call(loop, "apply_model", "tests.fake_engine:name_of_model").value == ["repeats its prompt"]
    for method in ("no_such", "_private", "rows"):
        reply = call(loop, "collective_rpc", method)
        assert reply.error_kind == "AttributeError" and method in reply.error
    assert call(loop, "collective_rpc", "fail", None, ["why"]).error == "why"
    assert call(loop, "collective_rpc", 5).error_kind == "InputError"


@pytest.mark.parametrize("verb", ["sleep", "wake_up"])
def test_verbs_that_are_not_built_say_so(verb):
    assert call(make_loop(), verb, 1).error_kind == "NotBuiltError"


def test_unknown_verbs_and_wrong_arguments_are_answers():
    loop = make_loop()
    assert "reset_prefix_cache" in call(loop, "reset_everything").error
    assert call(loop, "is_paused", 1, 2, 3).error_kind == "TypeError"
    assert set(call(loop, "stats").value) == set()
    assert all(entry.doc for entry in VERBS.values())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InputError("a", param="p"), "InputError"),
        (errors.NotBuiltError("b"), "NotBuiltError"),
        (errors.MissingExtraError("f", "e", "m"), "MissingExtraError"),
        (errors.EngineDeadError("x"), "EngineDeadError"),
        (TimeoutError("t"), "TimeoutError"),
        (KeyError("k"), "KeyError"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "UnicodeDecodeError"),
        (type("Odd", (ValueError,), {})("o"), "ValueError"),
        (type("Own", (Exception,), {})("o"), ""),
    ],
    ids=lambda e: str(e)[:20],
)
def test_errors_keep_their_kind_across_a_wire(error, kind):
    assert kind_of(error) == kind
    again = rebuild_error(kind, message_of(error))
    assert type(again).__name__ == (kind or "RuntimeError")
    assert message_of(error) in str(again.args[0])


# ---- driven by a queue


def test_run_serves_a_queue_and_waits_without_spinning():
    loop = make_loop(1)
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    said: list = []
    turns = 0
    step = loop.step

    def counted():
        nonlocal turns
        turns += 1
        return step()

    loop.step = counted
    thread = threading.Thread(target=loop.run, args=(inbox, said.append))
    thread.start()
    inbox.put(request("a", max_tokens=3))
    inbox.put(ControlCall(call_id=9, verb="is_paused"))
    deadline = time.monotonic() + 60
    while not any(o.finish_reason for m in said if isinstance(m, Outputs) for o in m.outputs):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    idle = -1
    while turns != idle:  # its last turns may come late; one that spins never comes to rest
        assert time.monotonic() < deadline
        idle = turns
        time.sleep(0.1)
    assert ControlReply(call_id=9, value=False) in said
    inbox.put(Abort(request_ids=("gone",)))
    inbox.put(Stop())
    thread.join(60)
    assert not thread.is_alive()


class Unprepared(FakeExecutor):
    """Whose start left some things out. Each waits until it may go on, and says when it begins."""

    left = 3

    def __init__(self, config) -> None:
        super().__init__(config)
        self.began: queue.SimpleQueue = queue.SimpleQueue()
        self.may_end: queue.SimpleQueue = queue.SimpleQueue()

    def prepare_idle(self) -> bool:
        assert self.plan is None or not self.flying
        self.began.put(self.num_steps)
        self.may_end.get(timeout=60)
        self.left -= 1
        return self.left > 0


def test_what_a_start_left_out_is_done_at_rest_and_delays_a_request_once(monkeypatch):
    monkeypatch.setattr("quire.engine.loop._REST", 0.01)
    loop = make_loop(1, executor=Unprepared)
    executor, inbox = loop.executor, queue.SimpleQueue()
    said: queue.SimpleQueue = queue.SimpleQueue()
    thread = threading.Thread(target=loop.run, args=(inbox, said.put))
    thread.start()
    assert executor.began.get(timeout=60) == 0
    inbox.put(request("a", max_tokens=3))  # while the first is done: the others must wait for it
    executor.may_end.put(None)
    while not any(o.finish_reason for o in said.get(timeout=60).outputs):
        assert executor.began.empty()
    steps = executor.num_steps
    for _ in range(2):
        assert executor.began.get(timeout=60) == steps
        executor.may_end.put(None)
    inbox.put(request("b", max_tokens=1))  # nothing is left: it is not asked again
    while not any(o.finish_reason for o in said.get(timeout=60).outputs):
        pass
    inbox.put(Stop())
    thread.join(60)
    assert not thread.is_alive() and executor.began.empty() and executor.left == 0


def test_held_requests_are_waited_for_and_unheld_ones_that_never_run_are_a_fault(monkeypatch):
    monkeypatch.setattr("quire.engine.loop._STALL_LIMIT", 5)
    loop = make_loop()
    loop.submit(request("a"))
    loop.scheduler.hold("a", Hold.KV_TRANSFER)
    for _ in range(20):
        assert loop.step() == []
    loop.scheduler.release("a", Hold.KV_TRANSFER)
    assert run(loop)["a"][1] is FinishReason.LENGTH
    loop.submit(request("b"))
    monkeypatch.setattr(type(loop.scheduler.planner), "_barred", lambda planner, request: True)
    with pytest.raises(RuntimeError, match="nothing could be planned 6 times"):
        run(loop)
