"""The audit of a pool's names: whatever way the columns and the maps can disagree, it says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.sched.audit import _check_pool
from quire.sched.blocks import BlockPool


def pool() -> BlockPool:
    """Eight blocks of two groups: 0 and 1 are free and named in the first, 2 in the second; 6 and 7 never taken."""
    made = BlockPool(8, 2)
    made.blank, made.num_touched = [5, 4, 3], 6
    for block, (name, group) in enumerate([(b"a", 0), (b"b", 0), (b"a", 1)]):
        made.names[block], made.homes[block] = name, group
        made.named[group][name] = block
        made.cached[block] = None
    return made


def test_what_agrees_passes() -> None:
    _check_pool(pool(), [], [])


FAULTS: dict[str, tuple[Callable[[BlockPool], object], str]] = {
    "a blank block has a name": (lambda p: p.names.__setitem__(5, b"c"), "among the blank"),
    "a cached block has none": (lambda p: p.names.__setitem__(1, None), "among the cached"),
    "another name": (lambda p: p.names.__setitem__(1, b"c"), "maps that find them differ"),
    "a name leads to another block": (lambda p: p.named[0].__setitem__(b"b", 0), "maps that find them differ"),
    "two names": (lambda p: p.named[0].__setitem__(b"c", 1), "maps that find them differ"),
    "named in two groups": (lambda p: p.named[1].__setitem__(b"b", 1), "not its own"),
    "another home": (lambda p: p.homes.__setitem__(1, 1), "not its own"),
    "a name that leads nowhere": (lambda p: p.named[0].pop(b"b"), "cannot be found"),
    "free twice": (lambda p: p.blank.append(0), "free blocks"),
    "blank twice": (lambda p: p.blank.__setitem__(0, 4), "free blocks"),
    "lost": (lambda p: p.blank.pop(), "free blocks"),
    "free and held": (lambda p: p.refs.__setitem__(3, 1), "counted wrongly"),
    "held, never taken": (lambda p: p.refs.__setitem__(7, 1), "counted wrongly"),
    "free, never taken": (lambda p: p.blank.__setitem__(0, 7), "never taken"),
    "named, never taken": (lambda p: p.names.__setitem__(7, b"c"), "cannot be found"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    broken = pool()
    make, words = FAULTS[fault]
    make(broken)
    with pytest.raises(AssertionError, match=words):
        _check_pool(broken, [], [])


def test_blocks_that_came_back_are_taken_first_then_those_that_never_were() -> None:
    blocks = BlockPool(6, 1)
    assert blocks.take(3) == (0, 1, 2) and blocks.num_free == 3
    blocks.drop([1, 0])
    assert blocks.take(3) == (0, 1, 3) and blocks.num_free == 2
    blocks.name(0, 2, b"a")
    blocks.drop([2])
    assert blocks.take(3) == (2, 4, 5) and blocks.num_free == 0 and blocks.names[2] is None
