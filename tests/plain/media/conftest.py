"""Media inputs that a test made are closed after it: each has threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quire.media.inputs import MediaInputs


@pytest.fixture
def made() -> Iterator[list[MediaInputs]]:
    several: list[MediaInputs] = []
    yield several
    for one in several:
        one.close()
