"""`make wheel` and the build behind it, with compilers that only write down what they were asked."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
NEEDED = ("Makefile", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
FAKE = """#!/bin/sh
echo "$0 $*" >> "$ASKED"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo "compiled by $0" > "$2"; fi; shift; done
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wheels with kernels are for Linux")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a wheel is made of, with cross compilers on the PATH that write their own name into what they make."""
    folder, tools = tmp_path / "checkout", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, folder / name)
    for name in ("csrc", "quire"):
        left = shutil.ignore_patterns("*.so", "__pycache__", "not_built.txt")
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    for name in ("c++", "x86_64-linux-gnu-g++", "aarch64-linux-gnu-g++"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip reads this as: no isolation
    for name in ("CXX", "QUIRE_BUILD_MACHINE", "QUIRE_BUILD_KERNELS", "QUIRE_BUILD_ISAS", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


def compiled_by(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.read("quire/ops/cpu/libquire_cpu.so").decode().split()[-1]).name


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_wheel_for_each_kind_of_machine(checkout: Path) -> None:
    environment = Path(sys.executable).parents[1]
    told = run(checkout, "make", "wheel", f"VENV={environment}")
    wheels = {
        re.search(r"-py3-none-linux_(\w+)\.whl", path.name).group(1): path for path in (checkout / "dist").iterdir()
    }
    assert set(wheels) == {"x86_64", "aarch64"} and all(path.name in told for path in wheels.values())
    for machine, wheel in wheels.items():
        own = machine == platform.machine()
        assert compiled_by(wheel) == ("c++" if own else f"{machine}-linux-gnu-g++")
    assert not (checkout / "build").exists(), "what lies there would get into the next wheel"
    asked = (checkout.parent / "asked").read_text()
    sets = set(re.findall(r"-DQC_ISA=(\w+)", asked))
    assert sets == {"neon", "dotprod", "avx2", "avx512", "avx512bf16", "amx"} and "QC_WITHOUT" not in asked


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_machine_without_a_compiler_is_named(checkout: Path) -> None:
    told = run(
        checkout, "make", "wheel", f"VENV={Path(sys.executable).parents[1]}", f"MACHINES=riscv64 {platform.machine()}"
    )
    assert "no riscv64-linux-gnu-g++ here: no wheel for riscv64" in told
    assert len(list((checkout / "dist").iterdir())) == 1


def test_native_compiles_one_set_and_leaves_the_others_out(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BUILD_ISAS", "native")
    monkeypatch.setenv("QUIRE_BUILD_KERNELS", "1")
    run(checkout, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    asked = (checkout.parent / "asked").read_text()
    sets, without = set(re.findall(r"-DQC_ISA=(\w+)", asked)), set(re.findall(r"-DQC_WITHOUT_(\w+)", asked))
    every = {"x86_64": {"avx2", "avx512", "avx512bf16", "amx"}}.get(platform.machine(), {"neon", "dotprod"})
    assert sets and not sets & without and sets | without == every
    assert len(sets) == 1 or sets == {"amx", "avx512"}


def test_sets_that_are_left_out_are_named_in_the_library() -> None:
    """A set that setup.py can leave out must be one that library.cpp leaves out of its table."""
    build, library = (ROOT / "setup.py").read_text(), (ROOT / "csrc/cpu/library.cpp").read_text()
    sets = set(re.findall(r'"(neon|dotprod|avx2|avx512|avx512bf16|amx)": ', build))
    assert len(sets) == 6 and set(re.findall(r"#ifndef QC_WITHOUT_(\w+)", library)) == sets


def test_ci_builds_wheels_for_both_and_installs_them() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    runners = ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert jobs["wheel"]["strategy"]["matrix"]["runner"] == jobs["install"]["strategy"]["matrix"]["runner"] == runners
    steps = [step.get("run", "") for step in jobs["install"]["steps"]]
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    for command in ("pip install dist/quire_llm-*_$(uname -m).whl", "quire pull default"):
        assert command in steps and command in quickstart, "CI installs as the page says"
    (build,) = [step for step in jobs["wheel"]["steps"] if "cibuildwheel" in step.get("uses", "")]
    assert build["env"]["CIBW_ENVIRONMENT"] == "QUIRE_BUILD_KERNELS=1"
