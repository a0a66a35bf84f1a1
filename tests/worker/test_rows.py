"""The persistent batch: no holes, lowest free row first, and changes a follower can replay in the documented order."""

import random

import pytest
import torch

from quire.sampling.processors import BatchUpdate, MoveDirectionality, process_dict_updates
from quire.schema.kv import KVGroup, KVKind
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.rows import Rows

GROUPS = [
    KVGroup(kind=KVKind.FULL, block_size=4, window=0, layers=("a",)),
    KVGroup(kind=KVKind.WINDOW, block_size=2, window=3, layers=("b",)),
]
PARAMS = ResolvedParams()


def new_row(name: str, tokens=(1, 2, 3), blocks=((), ())) -> NewRow:
    return NewRow(
        request_id=name, epoch=0, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), params=PARAMS, seed=0,
        blocks=blocks,
    )  # fmt: skip


def make_rows(max_rows: int = 8) -> Rows:
    return Rows(GROUPS, max_rows, 32, torch.device("cpu"))


def change(rows: Rows, *, left=(), joined=()):
    return rows.apply(StepPlan(step=1, grants=(), left=tuple(left), joined=tuple(new_row(n) for n in joined)))


def test_new_requests_take_the_lowest_holes_then_the_end():
    rows = make_rows()
    change(rows, joined="abcde")
    changes = change(rows, left="db", joined="xyz")
    assert [(row, new.request_id) for row, new in changes.added] == [(1, "x"), (3, "y"), (5, "z")]
    assert changes.removed == changes.moved == []
    assert rows.request_of == ["a", "x", "c", "y", "e", "z"]


def test_holes_are_filled_from_the_end():
    rows = make_rows()
    change(rows, joined="abcdefg")
    changes = change(rows, left="bdg")
    assert changes.removed == [1, 3, 6]
    assert changes.moved == [(5, 1), (4, 3)]
    assert rows.request_of == ["a", "f", "c", "e"]
    assert rows.row_of == {"a": 0, "f": 1, "c": 2, "e": 3}


def test_leaving_and_joining_again_in_one_plan_is_a_new_row():
    rows = make_rows()
    change(rows, joined="ab")
    changes = change(rows, left="a", joined="a")
    assert [(row, new.request_id) for row, new in changes.added] == [(0, "a")]


def test_unknown_ids_may_leave_and_a_full_or_doubled_batch_is_an_error():
    rows = make_rows(2)
    change(rows, joined="ab")
    assert change(rows, left="q").removed == []
    with pytest.raises(RuntimeError, match="more requests than there are rows"):
        change(rows, joined="c")
    with pytest.raises(RuntimeError, match="has not left"):
        change(rows, left="b", joined="a")


@pytest.mark.parametrize("seed", range(20))
def test_fuzz_followers_tables_and_tokens(seed):
    """Random comings and goings: a follower, the tokens and both block tables stay with their request."""
    rng = random.Random(seed)
    rows = make_rows(10)
    follower: dict[int, str] = {}
    tokens: dict[str, list[int]] = {}
    blocks: dict[str, list[list[int]]] = {}
    serial = 0
    for step in range(150):
        left = [name for name in tokens if rng.random() < 0.25]
        for name in left:
            del tokens[name], blocks[name]
        joined = []
        for _ in range(rng.randint(0, 10 - len(tokens))):
            name = f"r{serial}" if rng.random() < 0.9 or not left else left.pop()
            if name in tokens:
                continue
            serial += 1
            tokens[name] = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            blocks[name] = [[rng.randrange(-1, 99) for _ in range(rng.randint(0, 5))] for _ in GROUPS]
            joined.append(new_row(name, tokens[name], tuple(map(tuple, blocks[name]))))
        left_ids = [name for name in rows.row_of if name not in tokens or any(j.request_id == name for j in joined)]
        grants = []
        for name in rng.sample(sorted(tokens), len(tokens) // 2):
            more = tuple(tuple(rng.randrange(99) for _ in range(rng.randint(0, 1))) for _ in GROUPS)
            if len(blocks[name][0]) < 7:
                for own, new in zip(blocks[name], more, strict=True):
                    own.extend(new)
                grants.append(Grant(name, 0, 1, False, 0, more if any(more) else ()))
        changes = rows.apply(StepPlan(step=step, grants=tuple(grants), left=tuple(left_ids), joined=tuple(joined)))
        names = {row: new.request_id for row, new in changes.added}
        update = BatchUpdate(
            rows.num_rows,
            changes.removed,
            [(row, PARAMS, [], [row]) for row, _ in changes.added],
            [(source, target, MoveDirectionality.UNIDIRECTIONAL) for source, target in changes.moved],
        )
        process_dict_updates(follower, update, lambda p, prompt, out, names=names: names[out[0]])
        assert set(tokens) == set(rows.row_of)
        assert follower == dict(enumerate(rows.request_of)) == {row: name for name, row in rows.row_of.items()}
        for name, row in rows.row_of.items():
            assert rows.tokens[row, : len(tokens[name])].tolist() == tokens[name]
            assert rows.lengths[row] == len(tokens[name])
            for table, own in zip(rows.tables, blocks[name], strict=True):
                assert table.host[row, : len(own)].tolist() == own
                assert (table.host[row, len(own) :] == -1).all()
        for table in rows.tables:
            assert (table.host[rows.num_rows :] == -1).all()


def test_process_dict_updates_says_whether_the_dict_changed():
    state: dict[int, str] = {}

    def new_state(params, prompt_ids, output_ids):
        return "x" if output_ids else None

    def update(removed=(), added=(), moved=()):
        given = BatchUpdate(4, removed, [(row, PARAMS, None, ids) for row, ids in added], moved)
        return process_dict_updates(state, given, new_state)

    one_way, swap = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
    assert process_dict_updates(state, None, new_state) is False
    assert update(added=[(0, [])]) is False and state == {}
    assert update(added=[(0, [1]), (2, [1])]) is True and state == {0: "x", 2: "x"}
    assert update(added=[(0, [])]) is True and state == {2: "x"}  # replaced by a request without state
    assert update(moved=[(2, 1, one_way)]) is True and state == {1: "x"}
    assert update(moved=[(3, 1, swap)]) is True and state == {3: "x"}
    assert update(moved=[(0, 1, one_way)]) is False
    assert update(moved=[(0, 3, one_way)]) is True and state == {}  # an empty row moved over it
    assert update(removed=[3]) is False
