"""Every fenced block of the docs runs in a test, is data that is read here, or says why it cannot run."""

from __future__ import annotations

import json
import tomllib

import pytest
import yaml

from tests.fenced import ROOT, Block, asking, blocks, pages, programs

READ = {
    "json": lambda text: [json.loads(line) for line in text.splitlines()],
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
ALL = blocks()


def test_the_census_sees_every_fence() -> None:
    fences = sum(line.startswith("```") for page in pages() for line in page.read_text().splitlines())
    assert fences == 2 * len(ALL) and len(ALL) > 70


@pytest.mark.parametrize("block", ALL, ids=[block.name for block in ALL])
def test_a_block_runs_or_says_why_not(block: Block) -> None:
    assert block.language, f"{block.page}: a fence without a language; plain text is `text`"
    if block.why_not or block.language == "text":
        return
    if block.language in READ:
        assert READ[block.language](block.code)
        return
    assert block in (*programs(), *asking()), f"{block.page}: block {block.number} is run by no test and is no fragment"


def test_the_tests_that_run_them_take_them_all_from_here() -> None:
    assert "programs()" in (ROOT / "tests/engine/test_docs_examples.py").read_text()
    assert "asking()" in (ROOT / "tests/server/test_docs_endpoints.py").read_text()
    assert all(block.code.startswith("curl ") for block in asking() if block.language == "sh")
