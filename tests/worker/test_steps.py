"""The worker's step with a model one can see through: in any mix of chunks, decodes, moves, preemptions and look-ahead
every request gets the tokens it would get alone."""

import random

import pytest
import torch
from msgspec.structs import replace

from quire.schema.errors import NotBuiltError
from quire.schema.media import MediaItem
from quire.schema.params import PoolingParams
from quire.schema.step import Direction, EncodeItem, Grant, Mask, Move, NewRow, StepPlan
from tests.sampling.oracle import Known, log_softmax, next_token, resolved
from tests.worker.driver import Asked, Driver
from tests.worker.fakes import FakeModel, make_runner

CPU = torch.device("cpu")


def alone(model: FakeModel, request: Asked) -> list[int]:
    """The oracle's text of a request."""
    outputs: list[int] = []
    for _ in range(request.max_tokens):
        of = Known(request.params, request.prompt, outputs, request.seed, request.stop_token_ids)
        outputs.append(next_token(model.logits_after(request.prompt + outputs), of).token)
    return outputs


def make_requests(rng: random.Random, count: int, *, plain: bool = False) -> list[Asked]:
    asked = []
    for i in range(count):
        params = resolved(temperature=0.0, max_tokens=None)
        if not plain and rng.random() < 0.8:
            params = resolved(
                temperature=rng.choice([0.0, 0.8, 1.5]), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 0.8]),
                min_p=rng.choice([0.0, 0.05]), repetition_penalty=rng.choice([1.0, 1.4]),
                frequency_penalty=rng.choice([0.0, 0.5]), min_tokens=rng.choice([0, 5]), max_tokens=None,
                logprobs=rng.choice([None, 2]), prompt_logprobs=rng.choice([None, None, 0, 3, -1]),
                bad_words_token_ids=rng.choice([None, [[3], [1, 2], [5, 6, 7]]]),
            )  # fmt: skip
        asked.append(
            Asked(
                name=f"r{i}", prompt=[rng.randrange(40) for _ in range(rng.randint(1, 14))], params=params,
                seed=rng.getrandbits(64), max_tokens=rng.randint(1, 12), stop_token_ids=(7, 8, 9),
            )
        )  # fmt: skip
    return asked


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_the_text_it_would_get_alone(seed, ahead, staged):
    rng = random.Random(1000 * ahead + seed)
    model = FakeModel()
    asked = make_requests(rng, 14)
    Driver(make_runner(model, staged=staged), rng, ahead=ahead).run(asked)
    for request in asked:
        assert request.failed is None
        assert request.outputs == alone(model, request), request
        check_prompt_logprobs(model, request)
        for token, rows in zip(request.outputs, request.logprobs, strict=True):
            assert (rows is not None) == (request.params.logprobs is not None)
            if rows is not None:
                assert rows.token_ids[0][0] == token and len(rows.token_ids[0]) == 3 and len(rows.token_ids) == 1


def check_prompt_logprobs(model: FakeModel, request: Asked) -> None:
    k = request.params.prompt_logprobs
    if k is None:
        assert request.prompt_logprobs == {}
        return
    assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt)))
    for place, (token_ids, numbers, rank) in request.prompt_logprobs.items():
        wanted = log_softmax(model.logits_after(request.prompt[:place]))
        assert token_ids[0] == request.prompt[place]
        assert len(token_ids) == 1 + (40 if k < 0 else k)
        assert numbers == pytest.approx([wanted[token] for token in token_ids], abs=1e-4)
        assert rank == 1 + sum(value > wanted[token_ids[0]] for value in wanted)


def test_prompt_logprobs_in_pieces(monkeypatch):
    from quire.worker import runner as module

    monkeypatch.setattr(module, "_LOGIT_BYTES", 4 * 40 * 3)  # three positions at a time
    model = FakeModel()
    request = Asked("a", list(range(20, 31)), resolved(prompt_logprobs=2), 1, 1)
    Driver(make_runner(model), random.Random(0), ahead=0).run([request], preempt=0.0)
    check_prompt_logprobs(model, request)


def test_same_seed_same_text_in_any_company():
    texts = []
    for company in range(4):
        rng = random.Random(company)
        params = resolved(temperature=1.3, top_p=0.9, max_tokens=None)
        mine = Asked("mine", [3, 1, 4, 1, 5], params, seed=99, max_tokens=15)
        others = make_requests(rng, 3 * company)
        Driver(make_runner(), rng, ahead=company % 2).run([*others, mine])
        texts.append(mine.outputs)
    assert texts[1:] == texts[:-1]
    other = Asked("mine", [3, 1, 4, 1, 5], params, seed=100, max_tokens=15)
    Driver(make_runner(), random.Random(0), ahead=0).run([other])
    assert other.outputs != texts[0]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("staged, logprobs", [(False, 1), (True, 1), (True, None)])
def test_nan_logits_lose_their_request_alone(ahead, temperature, staged, logprobs):
    rng = random.Random(5)
    model = FakeModel()
    asked = make_requests(rng, 6, plain=True)
    victim = Asked("victim", [1, 2, 3], resolved(temperature=temperature, logprobs=logprobs), 7, 20)
    text = alone(model, victim)
    model.broken_states = {model.state_after([1, 2, 3, *text[:4]])}
    Driver(make_runner(model, staged=staged), rng, ahead=ahead).run([*asked, victim])
    assert victim.outputs == text[:4]
    assert "NaN" in victim.failed
    model.broken_states = set()
    for request in asked:
        assert request.failed is None and request.outputs == alone(model, request)


def test_a_request_whose_every_token_is_forbidden_fails_with_the_reason():
    params = resolved(temperature=0.0, allowed_token_ids=[3], bad_words_token_ids=[[3]])
    bad, good = Asked("bad", [1], params, 1, 4), Asked("good", [2], resolved(temperature=0.0), 1, 4)
    Driver(make_runner(), random.Random(0), ahead=0).run([bad, good])
    assert "forbid all" in bad.failed and good.outputs == alone(FakeModel(), good)


IMAGE = MediaItem(modality="image", key="k", offset=0, length=1)


def one_grant(name="a", tokens=(1, 2, 3), count=3, blocks=((0,), (1,)), **more) -> StepPlan:
    row = NewRow(
        request_id=name, epoch=0, token_ids=tokens, num_prompt_tokens=len(tokens),
        params=more.pop("params", resolved(temperature=0.0)), seed=0, blocks=((), ()),
    )  # fmt: skip
    return StepPlan(step=1, grants=(Grant(name, 0, count, True, 0, blocks, **more),), joined=(row,))


def test_grammar_masks_belong_to_grants_not_rows():
    runner = make_runner()
    plan = one_grant("a")
    runner.forward(plan)
    runner.sample(1, None).result()
    row = one_grant("b", blocks=((2,), (3,)))
    grants = (row.grants[0], Grant("a", 3, 1, True, 0))  # the newer row first
    runner.forward(StepPlan(step=2, grants=grants, joined=row.joined))
    bits = bytearray(8)
    bits[4] = 1 << 1  # token 33
    result = runner.sample(2, Mask(index=(0,), rows=bytes(bits), words=2)).result()
    assert result.sampled[0] == [33]
    assert result.sampled[1] == alone(FakeModel(), Asked("a", [1, 2, 3], resolved(temperature=0.0), 0, 2))[1:]


def test_a_plan_without_grants_frees_rows_and_samples_nothing():
    runner = make_runner()
    runner.forward(one_grant())
    runner.sample(1, None)
    runner.forward(StepPlan(step=2, grants=(), left=("a",)))
    assert runner.rows.num_rows == 0
    with pytest.raises(RuntimeError, match="without a forward"):
        runner.sample(2, None)


def test_a_step_is_sampled_by_its_name():
    runner = make_runner()
    runner.forward(one_grant())
    with pytest.raises(RuntimeError, match="step 2 is to be sampled, and step 1 was started last"):
        runner.sample(2, None)


def test_a_plan_that_contradicts_the_rows_is_an_error():
    for staged in (False, True):
        with pytest.raises(RuntimeError, match="no block for position 0"):
            make_runner(staged=staged).forward(one_grant(blocks=()))
    runner = make_runner()
    runner.forward(one_grant())
    with pytest.raises(RuntimeError, match="preempted"):
        runner.forward(StepPlan(step=2, grants=(Grant("a", 3, 1, True, 1),)))
    with pytest.raises(KeyError):
        runner.forward(StepPlan(step=2, grants=(Grant("nobody", 3, 1, True, 0),)))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (one_grant(num_drafts=1), "drafts"),
        (one_grant(params=PoolingParams(task="embed")), "'a' is to be pooled"),
        (replace(one_grant(), moves=(Move(0, 1, Direction.IN),)), "moves a KV block in by slot 0; there are 0"),
        (replace(one_grant(), moves=(Move(0, 7, Direction.OUT),)), "out by slot 7"),
        (
            replace(one_grant(), encode=(EncodeItem("a", MediaItem(modality="image", key="k", offset=0, length=1)),)),
            "1 media items to encode",
        ),
        (replace(one_grant(), free_encoded=("k",)), "media items"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_what_a_worker_cannot_do_is_refused_and_changes_nothing(plan, what, staged):
    runner = make_runner(staged=staged)
    with pytest.raises(NotBuiltError, match=what):
        runner.forward(plan)
    assert runner.rows.num_rows == 0


def test_memory_does_not_grow_with_requests():
    """Many short requests through few rows: what the worker holds afterwards is what it held at first."""
    runner = make_runner()
    rng = random.Random(0)
    driver = Driver(runner, rng, ahead=1)

    def held() -> tuple:
        sampler = runner.sampler
        return (
            len(runner.rows.row_of), len(runner._lost), runner.rows.tokens.shape,
            sum(entry is not None for entry in sampler.rows.lists), len(sampler._outputs),
        )  # fmt: skip

    start = held()
    for _ in range(10):
        driver.run(make_requests(rng, 6))
        assert held() == start
