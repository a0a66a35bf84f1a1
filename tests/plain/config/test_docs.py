"""The generated reference names every option and variable, tells the truth about availability, and is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.base import env
from quire.config.table import table
from tools.options_page import environment_page, main, options_page


def test_every_option_and_variable_has_a_row() -> None:
    options, variables = options_page(), environment_page()
    missing = [name for name in table() if f"| `{name}`" not in options]
    assert not missing
    assert all(f"`{variable.spellings[0]}`" in variables for variable in env.ALL.values())
    for row in options.splitlines():
        assert not row.startswith("| `") or row.replace("\\|", "").count("|") == 6, row


def test_availability_is_told() -> None:
    rows = {line.split("`")[1]: line for line in options_page().splitlines() if line.startswith("| `")}
    assert rows["max_num_seqs"].endswith("| available |")
    assert rows["prefill_context_parallel_size"].endswith("| not yet |")
    assert rows["tensor_parallel_size"].endswith("| available |")
    assert "no effect: a preempted request is recomputed" in rows["swap_space"]
    assert rows["speculative_config.method"].endswith("| available |")
    assert rows["speculative_config.code_revision"].endswith("| not yet |"), "a key of a mapping"
    assert "no effect: experts move between two steps" in rows["eplb_config.use_async"]
    assert "compilation_config.pass_config.enable_sp" in rows and "cache_config.hash_block_size" not in rows
    assert "works: `auto`, `safetensors`" in rows["load_format"]


def test_check_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert main(["--out", str(tmp_path)]) == 0 == main(["--check", "--out", str(tmp_path)])
    (tmp_path / "options.md").write_text("old")
    capsys.readouterr()
    assert main(["--check", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "options.md is stale" in said and "environment.md" not in said


def test_the_pages_of_the_repository_are_current() -> None:
    assert main(["--check"]) == 0
