"""The façade: what `quire` promises at its top is there, and the documented names are promised."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[3]
DOCUMENTED = {
    "LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs", "SamplingParams",
    "BeamSearchParams", "PoolingParams", "RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput",
    "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput",
    "ScoringOutput", "ScoringRequestOutput", "PromptType", "TextPrompt", "TokensPrompt",
}  # fmt: skip


def test_the_documented_names_are_exported() -> None:
    assert set(quire.__all__) >= DOCUMENTED


@pytest.mark.parametrize("name", sorted(quire.__all__))
def test_every_export_exists(name: str) -> None:
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quire.no_such_name


def test_the_version_is_the_distributions() -> None:
    assert quire.__version__ == importlib.metadata.version("quire-llm")


def imports_in(page: Path) -> list[tuple[str, str]]:
    """(module, name) of every `from quire… import …` in a page's code blocks."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    lines = re.findall(r"^from (quire[\w.]*) import (.+)$", "\n".join(blocks), re.MULTILINE)
    return [(module, name.strip()) for module, names in lines for name in names.split(",")]


def test_what_the_docs_import_exists() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [pair for page in pages for pair in imports_in(page)]
    assert found, "the docs show no import at all"
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"from {module} import {name}"
