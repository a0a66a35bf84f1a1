"""Files that lie, opened as a user would: an answer or one clear error, never a signal, a hang or a stack.

Some seconds of each kind, always the same files; `make fuzz-files` opens 2,000 of each. Some must answer, or nothing
behind the first check would be tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz_files import Child, Tally, bases_in, fuzz, started
from tests.hostile_files import KINDS, Damage

SEED, SECONDS, MOST = 20, 12, 60


@pytest.fixture(scope="module")
def bases() -> Iterator[Path]:
    with bases_in(None) as made:
        yield made


@pytest.fixture(scope="module")
def children(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    with started(1, SEED, bases, tmp_path_factory.mktemp("hostile")) as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_is_more_than_an_error(kind: str, children: list[Child]) -> None:
    tally: Tally = fuzz(kind, files=MOST, seconds=SECONDS, children=children)
    assert not tally.found, "\n".join(f"{kind} {SEED} {one}" for one in tally.found)
    assert tally.files >= 1
    if tally.files == MOST:  # on a machine that is not too busy
        assert tally.ends["answered"] >= MOST // 20 and tally.ends["CheckpointError"] >= MOST // 10


def test_the_same_numbers_make_the_same_file(bases: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        made = [Damage(bases, kind).make(3, index, tmp_path / "x")[1] for index in (0, 1, 2, 0, 1, 2)]
        assert made[:3] == made[3:] and len(set(made)) == 3
