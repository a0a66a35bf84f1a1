"""numa_bind and what goes with it: without effect, but mistakes that vLLM refuses are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.schema.errors import ConfigError
from tests.plain.config.test_ranks import resolve


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numa_bind_nodes": [0]}, r"numa_bind_nodes=\[0\] needs numa_bind"),
        ({"numa_bind_cpus": ["0-3"]}, r"numa_bind_cpus=\['0-3'\] needs numa_bind"),
        ({"numa_bind": True, "numa_bind_nodes": []}, "numa_bind_nodes is empty: name one for each device"),
        ({"numa_bind": True, "numa_bind_cpus": []}, "numa_bind_cpus is empty: name one for each device"),
        ({"numa_bind": True, "numa_bind_nodes": [0, -1]}, "numa_bind_nodes has -1: nodes are counted from 0"),
        *(
            ({"numa_bind": True, "numa_bind_cpus": ["0-3", entry]}, f"numa_bind_cpus has {entry!r}: each entry is a")
            for entry in ("", "x", "0-", "0,,1", "3-1", "0-3,9-8")
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"numa_bind": True},
        {"numa_bind": True, "numa_bind_nodes": [0, 1, 1]},
        {"numa_bind": True, "numa_bind_cpus": ["0-3,8", "4", "all", "!0-1", "+0-1"]},
    ],
)
def test_what_is_taken(options: dict[str, Any], tmp_path: Path) -> None:
    assert resolve(tmp_path, **options).numa_bind
