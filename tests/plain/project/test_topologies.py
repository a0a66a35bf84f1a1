"""The deployments that the pages of parallelism show: files that their readers accept, and commands that
`quire serve` does. What a cluster makes of them is not tried here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from quire.cli.serve import make_parser, options_of
from tests.fenced import ROOT, blocks

NAMES = ("parallel", "data_parallel", "several_machines", "engines_on_machines", "ray", "torchrun")
PAGE_FILES = [ROOT / f"docs/features/{name}.md" for name in NAMES]
PAGE = [block for name in NAMES for block in blocks() if str(block.page).endswith(f"features/{name}.md")]
COMMANDS = [
    found.strip()
    .replace("$(($LWS_WORKER_INDEX * 8))", "8")
    .replace("$(LWS_WORKER_INDEX)", "1")
    .replace("$(LWS_LEADER_ADDRESS)", "quire-0.quire")
    for block in PAGE
    for found in re.findall(r"\bquire serve ([^\n#]*)", block.code)
    if block.language in ("ini", "yaml", "console") or "/quire serve" in block.code or "exec quire serve" in block.code
]

BUILT = {
    name: (ROOT / file, arguments)
    for page in (*PAGE_FILES, ROOT / "docs/server/deploy.md")
    for file, arguments, name in re.findall(r"docker build -f (\S+) (.*)-t (\S+) \.", page.read_text())
}
CONTAINERS = [line for page in PAGE_FILES for line in re.findall(r"docker run (.*)", page.read_text())]


def entrypoint(image: str) -> list[str]:
    """What a container of one of our images runs before the arguments that follow the image's name."""
    found = re.search(r"^ENTRYPOINT (\[.*\])$", BUILT[image][0].read_text(), re.MULTILINE)
    assert found is not None
    return [str(word) for word in json.loads(found.group(1))]


def test_the_page_has_them_all() -> None:
    assert [block.language for block in PAGE].count("yaml") == 2 and len(COMMANDS) >= 8 and len(CONTAINERS) == 7


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted(command: str) -> None:
    args = make_parser("quire serve").parse_args(shlex.split(command))
    options_of(args)
    if args.nnodes > 1:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        assert (args.data_parallel_size if args.data_parallel_size > 1 else ranks) % args.nnodes == 0
        assert args.headless == (args.node_rank > 0) and args.master_addr != "127.0.0.1"


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_starts_what_it_is_to_start(container: str) -> None:
    """Its image is one that is built here; what follows the image goes to its entry point, or to the one given."""
    options, image, arguments = parts_of(container)
    if "--entrypoint" in options:
        program = options[options.index("--entrypoint") + 1]
        assert program == "ray" and "ray" in BUILT[image][1] and arguments[0] == "start"
    else:
        program, command, *before = entrypoint(image)
        args = make_parser("quire serve").parse_args([*before, *arguments])
        options_of(args)
        assert (program, command) == ("quire", "serve") and args.model_tag is not None
        assert args.headless == ("--no-healthcheck" in options)  # there is nobody to ask


def parts_of(container: str) -> tuple[list[str], str, list[str]]:
    """(options, image, arguments) of `docker run`."""
    words = shlex.split(container)
    at = next(number for number, word in enumerate(words) if word in BUILT)
    return words[:at], words[at], words[at + 1 :]


@pytest.mark.parametrize("file", sorted({file for file, _ in BUILT.values()}), ids=lambda file: Path(file).name)
def test_an_image_has_the_extras_that_it_is_built_with(file: Path) -> None:
    text = file.read_text()
    assert re.search(r"^ARG EXTRAS=hub,otel$", text, re.MULTILINE) and "[$EXTRAS]" in text
    assert all("EXTRAS=" not in arguments or "EXTRAS=hub,otel,ray" in arguments for _, arguments in BUILT.values())


def test_engines_of_all_machines_are_all_there_are() -> None:
    """Commands follow each other as their machines do: the server's, then one more."""
    containers = [shlex.join(arguments) for options, _, arguments in map(parts_of, CONTAINERS) if "ray" not in options]
    parsed = [make_parser("quire serve").parse_args(shlex.split(command)) for command in [*COMMANDS, *containers]]
    several = [args for args in parsed if args.data_parallel_address is not None]
    assert len(several) == 10
    for server, node in zip(several[::2], several[1::2], strict=True):
        assert not server.headless and node.headless and server.data_parallel_start_rank is None
        assert (server.model_tag, server.data_parallel_size) == (node.model_tag, node.data_parallel_size)
        assert server.data_parallel_size_local == (node.data_parallel_start_rank or 0)
        assert server.data_parallel_size_local + node.data_parallel_size_local == server.data_parallel_size
        meeting = [(args.data_parallel_address, args.data_parallel_rpc_port) for args in (server, node)]
        assert meeting[0] == meeting[1] and server.data_parallel_address != "127.0.0.1"


def test_the_unit_file() -> None:
    (unit,) = (block for block in PAGE if block.language == "ini")
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.code)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert parser["Service"]["Restart"] == "always" and "QUIRE_NODE_KEY" not in unit.code


def test_a_group_of_pods() -> None:
    group = next(
        yaml.safe_load(block.code) for block in PAGE if "LeaderWorkerSet" in block.code and block.language == "yaml"
    )
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{name}Template"]["spec"]["containers"][0] for name in ("leader", "worker"))
    assert f"-n {template['size']} " in leader["args"][0] and f"-n {template['size']} " in worker["args"][0]
    assert leader["env"] == worker["env"] and leader["env"][0]["name"] == "QUIRE_NODE_KEY"
    assert "--headless" in worker["args"][0] and "--headless" not in leader["args"][0]


def test_a_ray_cluster() -> None:
    cluster = next(yaml.safe_load(block.code) for block in PAGE if "RayCluster" in block.code)
    workers = cluster["spec"]["workerGroupSpecs"][0]
    container = workers["template"]["spec"]["containers"][0]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()  # the image's
    (sizes,) = re.findall(r"-tp (\d+) -pp (\d+)", head["args"][0])
    assert int(sizes[0]) * int(sizes[1]) == workers["replicas"] * int(
        container["resources"]["limits"]["nvidia.com/gpu"]
    )
