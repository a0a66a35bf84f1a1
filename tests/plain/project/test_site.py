"""The documentation as a site: every page has its place, and a wrong link, anchor or page fails the build."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def placed(nav: Any) -> Iterator[str]:
    for entry in nav:
        for place in entry.values():
            yield from placed(place) if isinstance(place, list) else [place]


def pages() -> set[str]:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "tools/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {path.relative_to(ROOT).as_posix() for path in module.pages()}


def test_every_page_has_its_place_once() -> None:
    found = list(placed(SITE["nav"]))
    assert len(found) == len(set(found)) and set(found) == pages()


def test_the_build_is_strict_and_fetches_nothing() -> None:
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
    assert SITE["validation"]["nav"]["omitted_files"] == SITE["validation"]["links"]["anchors"] == "warn"
    assert SITE["theme"]["font"] is False
    assert not [key for key in ("extra_css", "extra_javascript") if key in SITE]


def anchors(page: Path) -> set[str]:
    """As forges and mkdocs make them of headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_anchors_exist() -> None:
    for name in sorted(pages()):
        page = ROOT / name
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text()):
            other = (page.parent / target).resolve() if target else page
            assert anchor in anchors(other), f"{name}: {target}#{anchor}"


def test_the_pages_for_newcomers_are_there() -> None:
    for name in ("from/vllm", "from/llama_cpp", "from/ollama", "troubleshooting", "examples", "reference/python"):
        assert (ROOT / f"docs/{name}.md").is_file()


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_and_a_broken_link_does_not(tmp_path: Path) -> None:
    for name in ("tools/site.py", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "constraints.txt", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "benchmarks", "compat", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "tools/site.py"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    made = (tmp_path / "site/index.html").read_text()
    assert "make demo" in made and "fonts.googleapis" not in made
    page = tmp_path / "build/docs/docs/guide.md"
    page.write_text(page.read_text() + "\n[nowhere](no-such-page.md)\n")
    assert "no-such-page.md" in (done := build(tmp_path)).stderr and done.returncode != 0
