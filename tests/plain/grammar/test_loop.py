"""Masks, the gate and the loop together, over a worker that obeys masks: order, look-ahead, preemption, ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from quire.engine.loop import EngineLoop
from quire.grammar.backend import GrammarVocabulary
from quire.grammar.compiler import CompileLimits
from quire.grammar.masks import Masks
from quire.grammar.thought import Marks, Stage, Thought
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import OverloadedError
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, Mask, StepPlan
from tests.fake_engine import EOS, FURTHER_EOS, VOCAB, FakeExecutor, ids_of

pytest.importorskip("llguidance")
TURNS = 200_000


class Obedient(FakeExecutor):
    """Says what the prompt says if it may, else the lowest token it may."""

    def sample(self, step: int, mask: Mask | None) -> Any:
        done = super().sample(step, mask)
        assert self.plan is not None
        if mask is None:
            return done
        rows = np.frombuffer(mask.rows, np.uint8).reshape(len(mask.index), mask.words * 4)
        sampled = done.result().sampled
        for row, index in zip(np.unpackbits(rows, axis=1, bitorder="little"), mask.index, strict=True):
            grant = self.plan.grants[index]
            assert grant.samples
            own = sampled[index][0]
            assert row.any(), "a mask that allows nothing"
            token = own if row[own] else int(np.flatnonzero(row)[0])
            sampled[index][0] = self.worker.rows[grant.request_id][1][-1] = token
        return done


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokens=[b""] * 4 + [bytes([i]) for i in range(256)], size=VOCAB, ends=(EOS, FURTHER_EOS))


@pytest.fixture
def made(vocabulary: GrammarVocabulary) -> Iterator[list[Masks]]:
    opened: list[Masks] = []
    yield opened
    for masks in opened:
        masks.close()


class InStep(Obedient):
    """One of several ranks that have a loop each, and say something at the same point."""

    meeting = threading.Barrier(2, timeout=60)
    said: ClassVar[dict[int, bytes]] = {}
    rank = 0

    def gather(self, data: bytes) -> list[bytes]:
        self.said[self.rank] = data
        self.meeting.wait()
        every = [self.said[rank] for rank in sorted(self.said)]
        self.meeting.wait()
        return every


def make_loop(
    made: list[Masks], vocabulary: GrammarVocabulary, ahead: int = 0, num_blocks: int = 64,
    executor: type[Obedient] = Obedient, **more: Any,
) -> EngineLoop:  # fmt: skip
    fake = executor(SimpleNamespace(cache_config=SimpleNamespace(block_size=4), additional_config={}))
    layout = place(fake.load().specs, 0, num_blocks=num_blocks, max_model_len=100, max_num_seqs=8)
    settings = SchedulerSettings(max_model_len=100, max_num_batched_tokens=16, max_num_seqs=8, depth=ahead + 1)
    made.append(Masks(lambda: vocabulary, **more))
    return EngineLoop(fake, Scheduler(settings, layout), masks=made[-1])


def request(name: str, regex: str | None, prompt: str = "abcde", max_tokens: int = 12, **params: Any) -> EngineRequest:
    spec = None if regex is None else GrammarSpec(kind=GrammarKind.REGEX, text=regex, backends=("guidance",))
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(ids_of(prompt)), seed=0, max_tokens=max_tokens,
        params=ResolvedParams(max_tokens=max_tokens, stop_token_ids=(FURTHER_EOS,), grammar=spec, **params),
        eos_token_id=EOS,
    )  # fmt: skip


def run(loop: EngineLoop) -> dict[str, tuple[str, EngineOutput]]:
    """Text and last output of every request."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, EngineOutput] = {}
    for _ in range(TURNS):
        for output in loop.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                last[output.request_id] = output
        if loop.is_drained():
            assert not loop.masks._states and not loop.masks._pending
            assert not loop.scheduler.planner.holds.by_request
            return {n: (bytes(t - 4 for t in tokens[n] if t >= 4).decode(), out) for n, out in last.items()}
    raise AssertionError(f"still busy after {TURNS} turns")


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [64, 26])  # the second preempts
def test_every_text_follows_its_own_grammar(
    made: list[Masks], vocabulary: GrammarVocabulary, ahead: int, num_blocks: int
) -> None:
    loop = make_loop(made, vocabulary, ahead, num_blocks)
    for i in range(6):
        loop.submit(request(f"digits{i}", f"{i}[0-9]{{4}}x", max_tokens=30))
        loop.submit(request(f"free{i}", None, max_tokens=7))
    found = run(loop)
    for i in range(6):
        text, last = found[f"digits{i}"]
        assert text == f"{i}0000x" and last.finish_reason is FinishReason.STOP
        text, last = found[f"free{i}"]
        assert text == "abcdeab" and last.finish_reason is FinishReason.LENGTH


def test_a_compiling_request_is_overtaken(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    loop = make_loop(made, vocabulary)
    for i in range(100):  # more than the scheduler turns away in one step
        loop.submit(request(f"waits{i}", f"w{i}"))
    loop.submit(request("free", None, max_tokens=3))
    said: list[str] = []
    for _ in range(TURNS):
        said += [o.request_id for o in loop.step() if o.finish_reason is not None]
        if loop.is_drained():
            break
    assert said[0] == "free"
    assert sorted(said[1:]) == sorted(f"waits{i}" for i in range(100))


def test_a_grammar_is_dropped_with_the_last_request_that_waits_for_it(
    made: list[Masks], vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, dropped = make_loop(made, vocabulary), []
    monkeypatch.setattr(made[0].compiler, "submit", lambda spec: None)
    monkeypatch.setattr(made[0].compiler, "drop", lambda spec: dropped.append(spec.text))
    for name, regex in (("a", "x"), ("b", "x"), ("c", "y")):
        loop.submit(request(name, regex))
    loop.abort(["a"])
    assert dropped == []
    loop.abort(["c", "b"])
    assert dropped == ["y", "x"] and not made[0]._num_waiting


def test_a_full_compiler_refuses_as_a_full_queue_does(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    loop = make_loop(made, vocabulary, limits=CompileLimits(num_workers=1, most_queued=3))
    for i in range(50):
        loop.submit(request(f"r{i}", f"a{i}"))
    found = run(loop)
    kinds = {last.error_kind for _, last in found.values() if last.finish_reason is FinishReason.ERROR}
    assert kinds == {"OverloadedError"} and found["r0"][0] == "a0"
    loop.submit(request("later", "later"))
    assert run(loop)["later"][0] == "later"


def test_a_refused_grammar_ends_its_request_alone(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    loop = make_loop(made, vocabulary)
    loop.submit(request("bad", "a(?=b)"))
    loop.submit(request("good", "[a-c]{3}"))
    found = run(loop)
    assert found["good"][0] == "abc"
    bad = found["bad"][1]
    assert (
        bad.finish_reason is FinishReason.ERROR and bad.error_kind == "InputError" and "look-around" in str(bad.error)
    )
    loop.submit(request("again", "a(?=b)"))  # known by now
    assert run(loop)["again"][1].error == bad.error


@pytest.mark.parametrize("ahead", [0, 1])
def test_ends(made: list[Masks], vocabulary: GrammarVocabulary, ahead: int) -> None:
    loop = make_loop(made, vocabulary, ahead)
    early = {"extra_args": {"eos_at": 2}}  # the worker would end at its second token
    loop.submit(request("held", "[a-e]{5}", **early))
    loop.submit(request("free to", "[a-e]{1,9}", **early))
    loop.submit(request("ignores", "[a-e]{4}", ignore_eos=True))
    loop.submit(request("least", "[a-e]{2}", min_tokens=9))
    loop.submit(request("long", "[a-e]*", max_tokens=8))
    found = run(loop)
    assert {name: (text, out.finish_reason.value) for name, (text, out) in found.items()} == {
        "held": ("aacde", "stop"), "free to": ("a", "stop"), "ignores": ("abcd", "stop"), "least": ("ab", "stop"),
        "long": ("abcdeabc", "length"),
    }  # fmt: skip


def test_abort_while_compiling(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    loop = make_loop(made, vocabulary)
    loop.submit(request("gone", "[a-z]{2}"))
    loop.abort(["gone"])
    loop.submit(request("kept", "[x-z]{2}"))
    found = run(loop)
    assert found["kept"][0] == "xx" and found["gone"][1].finish_reason is FinishReason.ABORT


def test_a_vocabulary_that_cannot_be_had_fails_the_request_not_the_engine(
    made: list[Masks], vocabulary: GrammarVocabulary
) -> None:
    def broken() -> GrammarVocabulary:
        raise OSError("no such tokenizer")

    loop = make_loop(made, vocabulary)
    made[-1].compiler._make_vocabulary = broken
    loop.submit(request("a", "[a-z]"))
    loop.submit(request("b", None, max_tokens=2))
    tokens = [o for _ in range(TURNS) if not loop.is_drained() for o in loop.step()]
    ended = {o.request_id: o for o in tokens if o.finish_reason is not None}
    assert "no such tokenizer" in str(ended["a"].error) and ended["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("start", "inside", "text"),
    [
        ("", True, "abcd00"),  # open from the start, ends with "cd"
        ("ab", False, "abcd00"),  # opens with "ab"
        ("ax", False, "axcd00"),  # once begun, the tag is completed
        ("x", False, "00"),  # may open, and does not
    ],
)
def test_a_grammar_does_not_apply_to_a_thought(
    made: list[Masks], vocabulary: GrammarVocabulary, start: str, inside: bool, text: str
) -> None:
    marks = make_marks(vocabulary, start)
    loop = make_loop(made, vocabulary, watch=lambda given: Thought(marks, inside=inside, bound=True))
    loop.submit(request("thinks", "[0-9]{2}"))
    assert run(loop)["thinks"][0] == text


@pytest.mark.parametrize(("regex", "text"), [("(a0|[0-9])1", "abcd01"), ("a[b-e]cc", "abcc"), ("a[c-e]", "abcdac")])
def test_a_start_tag_that_could_be_the_answer_too(
    made: list[Masks], vocabulary: GrammarVocabulary, regex: str, text: str
) -> None:
    marks = make_marks(vocabulary, "abx" if regex == "a[b-e]cc" else "ab")
    loop = make_loop(made, vocabulary, watch=lambda given: Thought(marks, inside=False, bound=True))
    loop.submit(request("thinks", regex))
    assert run(loop)["thinks"][0] == text


def make_marks(vocabulary: GrammarVocabulary, start: str, end: str = "cd", said: str = "") -> Marks:
    starts, tokens = (start.encode(),) if start else (), vocabulary.tokens
    return Marks(starts, (end.encode(),), tuple(ids_of(start)), tuple(ids_of(said or end)), tokens.__getitem__)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 26])  # the second preempts
@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (0, "xy00"),  # closed at once
        (2, "abxy00"),
        (3, "abcxy00"),  # "c" begins a tag, and what is forced is another
        (4, "abcd00"),  # it closed itself
        (None, "abcd00"),
    ],
)
def test_a_budget_closes_a_thought(
    made: list[Masks], vocabulary: GrammarVocabulary, ahead: int, num_blocks: int, budget: int | None, text: str
) -> None:
    marks = make_marks(vocabulary, "", said="xy")
    loop = make_loop(
        made, vocabulary, ahead, num_blocks,
        watch=lambda given: Thought(
            marks, inside=True, bound=given.params.grammar is not None, budget=given.params.thinking_token_budget
        ),
    )  # fmt: skip
    for i in range(5):
        loop.submit(request(f"bound{i}", "[0-9]{2}", thinking_token_budget=budget))
        loop.submit(request(f"free{i}", None, thinking_token_budget=budget, max_tokens=9))
    found = run(loop)
    free = text[:-2]
    for i in range(5):
        assert found[f"bound{i}"][0] == text
        assert found[f"free{i}"][0][: len(free)] == free and len(found[f"free{i}"][0]) == 9


def test_no_end_of_text_inside_a_thought_that_a_grammar_waits_for(
    made: list[Masks], vocabulary: GrammarVocabulary
) -> None:
    marks = make_marks(vocabulary, "")
    loop = make_loop(made, vocabulary, watch=lambda given: Thought(marks, inside=True, bound=True))
    loop.submit(request("thinks", "[0-9]{2}", extra_args={"eos_at": 2}))
    text, last = run(loop)["thinks"]
    assert text.endswith("cd00") and last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("pieces", "stage"),
    [
        ([b"<think>", b"a", b"</think>"], Stage.OVER),
        ([b" \n", b"<th", b"ink>a</thi", b"nk>\n", b"x"], Stage.OVER),  # tags cut anyhow, within other tokens
        ([b"<think>", b"</think"], Stage.INSIDE),
        ([b"<thin"], Stage.MAY_OPEN),
        ([b"<thing>"], Stage.OVER),
        ([b"Well, <think>"], Stage.OVER),
    ],
)
def test_tags_are_found_however_they_are_cut(pieces: list[bytes], stage: Stage) -> None:
    marks = Marks((b"<think>",), (b"</think>",), (1,), (2,), pieces.__getitem__)
    thought = Thought(marks, inside=False, bound=False, budget=100)
    for i in range(len(pieces)):
        thought.feed(i)
    assert thought.stage is stage


def allowed(mask: Mask) -> dict[tuple[int, int], str]:
    """What each row lets follow, by grant and offset; the end as a full stop."""
    rows = np.frombuffer(mask.rows, np.uint8).reshape(len(mask.index), mask.words * 4)
    places = zip(mask.index, mask.offsets or (0,) * len(mask.index), strict=True)
    texts = [
        "".join("." if i == EOS else chr(i - 4) for i in np.flatnonzero(bits) if i == EOS or i >= 4)
        for bits in np.unpackbits(rows, axis=1, bitorder="little")
    ]
    return dict(zip(places, texts, strict=True))


def ready_masks(made: list[Masks], vocabulary: GrammarVocabulary, *requests: EngineRequest, **more: Any) -> Masks:
    made.append(masks := Masks(lambda: vocabulary, **more))
    for one in requests:
        masks.add(one)
    for _ in range(TURNS):
        if not masks.compiling:
            return masks
        masks.wait(0.01)
        masks.poll()
    raise AssertionError("not compiled")


def checks(name: str, num_drafts: int) -> Grant:
    return Grant(name, 5, 1 + num_drafts, True, 0, (), num_drafts)


def test_drafts_get_a_row_for_every_place_they_may_reach(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    masks = ready_masks(made, vocabulary, request("a", "ab[cd]e?"), request("b", "x*y"), request("c", "[k-m]z"))
    plan = StepPlan(step=1, grants=(checks("a", 4), checks("b", 3), Grant("c", 5, 1, True, 0), checks("free", 3)))
    masks.propose({"a": ids_of("abd."), "b": ids_of("xzx"), "gone": [1]})
    for _ in range(2):  # the place itself has not moved
        mask, lost = masks.mask(plan)
        assert mask is not None and not lost
        assert allowed(mask) == {
            (0, 0): "a", (0, 1): "b", (0, 2): "cd", (0, 3): ".e",  # and no further: what was drafted ends nothing
            (1, 0): "xy", (1, 1): "xy",  # z does not follow
            (2, 0): "klm",
        }  # fmt: skip
    masks.advance([EngineOutput(request_id="a", new_token_ids=ids_of("ab"))])
    mask, _ = masks.mask(plan)
    assert mask is not None and {k: v for k, v in allowed(mask).items() if k[0] == 0} == {(0, 0): "cd"}, (
        "drafts are old"
    )


def test_min_tokens_counts_drafts_before_an_end(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    masks = ready_masks(made, vocabulary, request("a", "a*", min_tokens=2))
    masks.propose({"a": ids_of("aaa")})
    mask, _ = masks.mask(StepPlan(step=1, grants=(checks("a", 3),)))
    assert mask is not None
    assert allowed(mask) == {(0, 0): "a", (0, 1): "a", (0, 2): ".a", (0, 3): ".a"}


def test_drafts_lead_through_reasoning_into_the_grammar(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    marks = Marks((b"<",), (b">",), tuple(ids_of("<")), tuple(ids_of(">")), lambda i: vocabulary.tokens[i])
    masks = ready_masks(
        made, vocabulary, request("a", "[xy]z"), watch=lambda given: Thought(marks, inside=True, bound=True)
    )
    for _ in range(2):  # nothing of it stays
        masks.propose({"a": ids_of("q>xz")})
        mask, lost = masks.mask(StepPlan(step=1, grants=(checks("a", 4),)))
        assert mask is not None and not lost
        rows = allowed(mask)
        assert len(rows[0, 0]) > 200 and rows[0, 0].count(".") == 1 and rows[0, 1] == rows[0, 0], "anything but an end"
        assert [rows[0, offset] for offset in (2, 3, 4)] == ["xy", "z", "."]
    masks.advance([EngineOutput(request_id="a", new_token_ids=ids_of("q>y"))])
    masks.propose({"a": ids_of("zz")})
    mask, _ = masks.mask(StepPlan(step=2, grants=(checks("a", 2),)))
    assert mask is not None and allowed(mask) == {(0, 0): "z", (0, 1): "."}, "drafts follow it after reasoning too"


def test_drafts_do_not_outrun_a_reasoning_budget(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    marks = Marks((b"<",), (b">",), tuple(ids_of("<")), tuple(ids_of("!>")), lambda i: vocabulary.tokens[i])
    masks = Masks(lambda: vocabulary, watch=lambda given: Thought(marks, inside=True, bound=False, budget=2))
    made.append(masks)
    assert masks.add(request("a", None, thinking_token_budget=2))
    masks.propose({"a": ids_of("qr!>s")})
    mask, lost = masks.mask(StepPlan(step=1, grants=(checks("a", 5),)))
    assert mask is not None and not lost
    rows = allowed(mask)
    assert [len(rows[0, offset]) > 200 for offset in range(6)] == [True, True, False, False, True, True]
    assert (rows[0, 2], rows[0, 3]) == ("!", ">"), "the end is forced where the budget is used up"


def test_ranks_refuse_together_what_one_of_them_refuses(made: list[Masks], vocabulary: GrammarVocabulary) -> None:
    """Each rank compiles for itself: one may be slower than a limit, or find its queue full. A request that only some
    of them know is the end of all."""
    loops = [make_loop(made, vocabulary, executor=InStep) for _ in range(2)]
    steps: list[list[tuple[str, ...]]] = [[], []]
    found: dict[int, Any] = {}

    def serve(rank: int) -> None:
        loop: Any = loops[rank]
        loop.executor.rank, forward, add = rank, loop.executor.forward, loop.masks.add

        def refuse(given: EngineRequest) -> bool:
            if (given.request_id, rank) in {("full", 0), ("slow", 1)}:
                raise OverloadedError(f"{given.request_id} here")
            return bool(add(given))

        def noted(plan: StepPlan) -> None:
            steps[rank].append(tuple(grant.request_id for grant in plan.grants))
            forward(plan)

        loop.masks.add, loop.executor.forward = refuse, noted
        for name in ("full", "good", "slow"):
            loop.submit(request(name, "[0-9]{3}x" + name))
        loop.submit(request("free", None))
        found[rank] = {name: (text, out.finish_reason, out.error) for name, (text, out) in run(loop).items()}

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and steps[0] == steps[1]
    for name in ("full", "slow"):
        assert found[0][name] == ("", FinishReason.ERROR, f"{name} here")
    assert found[0]["good"][0] == "000xgood" and found[0]["free"][1] is FinishReason.LENGTH
