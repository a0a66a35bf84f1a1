"""The files around the package: docs name real things, links lead somewhere, dependencies are justified."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from quire.checkpoint.media import MODALITIES
from quire.config.unavailable import all_rows, reason
from quire.models.zoo import ZOO

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


# What README says is missing -> the reason in quire/config/unavailable.txt that its options are refused for.
ABSENT_FEATURES = {
    "sleep mode": "sleep", "KV transfer": "kv-transfer", "encoder outputs": "encoder-transfer",
    "weight transfer": "weight-transfer", "offloading of KV": "kv-offloading", "weights to host": "weight-offloading",
    "an indexer": "sparse-attention", "denoising models": "denoising", "gRPC": "grpc", "Cohere's API": "cohere",
}  # fmt: skip


def missing_features() -> str:
    """That part of README, without line breaks."""
    part = (ROOT / "README.md").read_text().partition("## What does not work yet")[2].partition("\n## ")[0]
    return " ".join(part.split())


@pytest.mark.parametrize("feature", ABSENT_FEATURES)
def test_what_readme_says_is_missing_is_refused(feature: str) -> None:
    """When the feature comes its rows go, and it leaves README with them."""
    used = {row.why for rows in all_rows().values() for row in rows if row.is_refused}
    assert feature in missing_features() and reason(ABSENT_FEATURES[feature]) in used


def test_every_feature_that_options_are_refused_for_is_in_readme() -> None:
    text = (ROOT / "quire/config/unavailable.txt").read_text().partition("[reasons]")[2].partition("\n[")[0]
    denied = {line.split(" | ")[0].strip() for line in text.splitlines() if "| this version" in line}
    small = {"step-metrics"}  # a setting of what there is
    assert denied - small <= set(ABSENT_FEATURES.values())


def test_readme_names_the_missing_routes() -> None:
    source = (ROOT / "quire/server/missing.py").read_text()
    routes = re.findall(r'"(/v1/[a-z/]+)"', source.partition("MISSING = {")[2].partition("}  # fmt")[0])
    words = {
        "/v1/audio/speech": "`/v1/audio/speech`", "/v1/systemone": "", "/v1/images/generations": "make images",
        "/v1/images/edits": "make images", "/v1/moderations": "moderate", "/v1/files": "files and batches over HTTP",
        "/v1/batches": "files and batches over HTTP",
    }  # fmt: skip
    assert set(routes) == set(words)
    assert all(said in missing_features() for said in words.values())


def test_readme_counts_models_as_they_are() -> None:
    table = (ROOT / "docs/models.md").read_text().partition("## On a GPU")[0]
    native = re.findall(r"^\| \S+ \| (\S+) \| native \|", table, re.MULTILINE)
    fallback = re.findall(r"^\| \S+ \| \S+ \| fallback \|", table, re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert f"{len(native)} causal model types declared natively" in readme
    assert f"; {len(fallback)} more through transformers' code" in readme
    assert f"in prompts and chats of {len(MODALITIES)} architectures" in readme
    assert [name for name in native if name not in ZOO] == []


def test_each_core_dependency_is_justified_once() -> None:
    core = (ROOT / "docs/dependencies.md").read_text().split("## Extras")[0]
    listed = [name.lower() for name in re.findall(r"^\| ([\w.-]+) \|", core, re.MULTILINE)][1:]
    assert sorted(listed) == sorted(name_of(r) for r in PROJECT["dependencies"])


def test_each_extra_is_described() -> None:
    extras = (ROOT / "docs/dependencies.md").read_text().split("## Extras")[1]
    assert set(re.findall(r"`([\w-]+)`(?=[^|]*\|[^|]*\|[^|]*\|$)", extras, re.MULTILINE)) >= set(
        PROJECT["optional-dependencies"]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_found_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^):#]+\.md)", page.read_text())
        todo += [p for p in ((page.parent / link).resolve() for link in links) if p not in seen]
    assert set(PAGES) <= seen, f"no link leads to {[p.name for p in PAGES if p not in seen]}"


def test_reference_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sizes_counts_every_line() -> None:
    done = subprocess.run(
        [sys.executable, "tools/sizes.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.split("\n\n")[0].splitlines()}
    files = sorted((ROOT / "quire").rglob("*.py"))
    assert int(rows["quire"][0]) == len(files)
    assert int(rows["quire"][1]) == sum(path.read_text().count("\n") for path in files)


def test_make_targets_named_in_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for command in re.findall(r"`make ([a-z ]+)`", page.read_text()):
            assert set(command.split()) <= targets, f"{page.name}: make {command}"


def test_ci_runs_what_the_readme_says() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_workflow_runs_what_ci_runs() -> None:
    assert "make isas" in (ROOT / ".ci/run").read_text()
    assert "run: .ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()


def test_files_of_tests_run_in_the_order_of_a_seed(tmp_path: Path) -> None:
    """Whole files move; the tests of each stay together and in order."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    for name in "abcdefgh":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_another(): pass\n")

    def order(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
        own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}  # ours alone
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True, timeout=300)
        return [line for line in done.stdout.splitlines() if "::" in line]

    plain, first, second = order(), order("--file-order", "1"), order("--file-order", "2")
    assert len(plain) == 16 and sorted(first) == sorted(second) == sorted(plain)
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3 and order("--file-order", "1") == first
    for one, other in zip(first[::2], first[1::2], strict=True):
        assert one.endswith("::test_one") and other == one.replace("test_one", "test_another")
    mixed = order("--test-order", "1")
    assert mixed == order("--test-order", "1") != plain and sorted(mixed) == sorted(plain)
    assert [line.partition("::")[0] for line in mixed] == [line.partition("::")[0] for line in plain]
    conftest = tmp_path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("engine/test_every_architecture", "test_e test_c"))
    (tmp_path / "tests").mkdir()
    for path in tmp_path.glob("test_*.py"):
        path.rename(tmp_path / "tests" / path.name)
    for seed in ("1", "2", "3"):
        files = list(dict.fromkeys(line.partition("::")[0] for line in order("--file-order", seed)))
        assert set(files[:2]) == {"tests/test_e.py", "tests/test_c.py"} and len(files) == 8


@pytest.mark.parametrize(
    ("module", "ours"),
    [("quire.engine.loop", True), ("quire", True), ("vllm.shims", True), ("tests.plain.test_x", True),
     ("transformers.utils", False), ("quirement", False), ("numpy", False)],
)  # fmt: skip
def test_deprecation_warnings_of_our_own_code_are_errors(module: str, ours: bool) -> None:
    with pytest.raises(DeprecationWarning) if ours else contextlib.nullcontext():
        warnings.warn_explicit("old", DeprecationWarning, "any.py", 1, module=module)


def test_long_files_of_tests_are_there() -> None:
    from tests.conftest import LONG_FILES

    assert LONG_FILES and [name for name in LONG_FILES if not (ROOT / name).is_file()] == []


def test_pins_lie_within_the_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {name_of(name): version for name, version in pins.items()}
    assert versions["torch"] == "2.13.0"
    requirements = [Requirement(r) for r in PROJECT["dependencies"]]
    for requirement in requirements:
        assert requirement.specifier.contains(versions[name_of(requirement.name)]), requirement
