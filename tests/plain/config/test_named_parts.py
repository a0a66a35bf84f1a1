"""Which configurations name parts of their model: asked before anything of a configuration is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.media import names_parts
from quire.checkpoint.parts import find_parts


@pytest.mark.parametrize("names", [5, "UltravoxModel", [5], [{"a": 1}], [["UltravoxModel"]], {"a": 1}, None])
def test_names_that_are_none(names: Any, tmp_path: Path) -> None:
    raw = {"architectures": names}
    assert not names_parts(raw)
    assert find_parts(raw, str(tmp_path), lambda source: source) == (raw, {})


def test_names_beside_others() -> None:
    assert names_parts({"architectures": [{}, "UltravoxModel"]}) and not names_parts({"architectures": ["Llama"]})
