"""`quire simulate`: its table, JSON and picture, and one clear line for every wrong value."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.cli.main import main
from tests.plain.simulate.small import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


LOAD = ("--input-len", "64", "--output-len", "8", "--num-requests", "24", "--request-rate")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["simulate", *arguments])
    return status, *capsys.readouterr()


def test_a_table_has_a_row_for_every_combination(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", model, "-tp", "1", "2", *LOAD, "50", "100")
    lines = out.splitlines()
    assert status == 0 and "TTFT p50" in lines[0]
    assert [line.split("  ")[0].strip() or line.strip()[:11] for line in lines[1:5]] == [
        "TP 1 x DP 1", "TP 1 x DP 1", "TP 2 x DP 1", "TP 2 x DP 1",
    ]  # fmt: skip
    assert "on H200 (measured); latencies in ms" in lines[5]


def test_json_holds_every_figure(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", model, "-dp", "6", "--device", "h100", "--json", *LOAD, "100")
    (result,) = json.loads(out)
    assert status == 0 and result["num_devices"] == 6 and result["simulated_replicas"] == 4
    assert result["device"] == "H100" and result["device_is_measured"] is False
    assert 0 < result["ttft_p50"] <= result["ttft_p99"] and result["attainment"] == 1.0
    status, out, _ = run(capsys, "--model", model, "-dp", "6", "--device", "h100", *LOAD, "100")
    assert "by its data sheet, not measured" in out and "of larger fleets 4 replicas were simulated" in out


def test_devices_are_searched_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", model, "--find-devices", "--slo-ttft-ms", "60", "-tp", "1", "--json", *LOAD, "800")
    status, out, _ = run(capsys, *arguments)
    (result,) = json.loads(out)
    assert status == 0 and result["attainment"] >= 0.99 and 1 <= result["num_devices"] < 30
    status, _, err = run(capsys, *(a if a != "60" else "0.001" for a in arguments))
    assert status == 1 and "no topology of up to 10,000 devices keeps these goals" in err


def test_a_terminal_shows_how_many_simulations_have_ended(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, search = (*LOAD, "50", "100"), ("--find-devices", "--slo-ttft-ms", "60", "-tp", "1", *LOAD, "800")
    for arguments, shown in ((rates, "2/2 "), (search, " simulations")):
        assert run(capsys, "--model", model, *arguments)[2] == ""  # not a terminal
        with monkeypatch.context() as terminal:
            terminal.setattr(type(sys.stderr), "isatty", lambda self: True)
            assert shown in run(capsys, "--model", model, *arguments)[2]
            assert run(capsys, "--model", model, "--disable-tqdm", *arguments)[2] == ""


def test_a_trace_is_replayed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt_tokens": 200, "output_tokens": 4, "prefix_group": "a", "prefix_tokens": 128}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line | {"arrival": i / 20}) for i in range(40)))
    status, out, _ = run(capsys, "--model", model, "--trace", str(trace), "--json")
    (result,) = json.loads(out)
    assert status == 0 and result["prefix_hit_rate"] > 0.5 and result["request_rate"] == pytest.approx(20, rel=0.1)
    status, _, err = run(capsys, "--model", model, "--trace", str(trace), "-dp", "9000", "--router", "round-robin")
    assert status == 0 or "too few requests for 9000 replicas" in err


@pytest.mark.parametrize("rates", [("50",), ("50", "100")])
def test_a_picture_is_drawn(
    rates: tuple[str, ...], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.svg"
    assert run(capsys, "--model", model, "-tp", "1", "2", "--plot", str(path), *LOAD, *rates)[0] == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_without_matplotlib_the_command_to_install_it_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr("quire.bench.plot.load", lambda path: refuse(path.partition(":")[0]))
    status, _, err = run(capsys, "--model", model, "--plot", str(tmp_path / "c.png"), *LOAD, "50")
    assert status == 1 and 'pip install "quire-llm[bench]"' in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--device", "abacus"), "--device 'abacus' is unknown; choose one of H200"),
        (("-tp", "3"), "tensor_parallel_size=3 does not divide the 16 attention heads"),
        (("-dp", "20000"), "20000 devices; at most 10000 are simulated"),
        (("--request-rate", "-1"), "--request-rate must be above 0"),
        (("--num-requests", "0"), "--num-requests must be at least 1, got 0"),
        (("--simulated-replicas", "0"), "--simulated-replicas must be at least 1"),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms must be above 0, got 0"),
        (("--slo-attainment", "1.5"), "--slo-attainment must be in (0, 1], got 1.5"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization must be in (0, 1]"),
        (("--inter-token-latency-goal-ms", "nan"), "--inter-token-latency-goal-ms must be at least 0"),
        (("--max-model-len", "50000"), "--max-model-len must be between 2 and the model's 40960, got 50000"),
        (("--max-model-len", "100"), "longer than max_model_len=100"),
        (("--max-num-batched-tokens", "-5"), "max_num_batched_tokens must be at least 1, got -5"),
        (("--max-concurrency", "4", "--request-rate", "5"), "--max-concurrency is a load of its own"),
        (("--find-devices",), "--find-devices needs a goal"),
        (("--find-devices", "--slo-itl-ms", "5"), "--find-devices needs a load"),
        (("--find-devices", "--slo-itl-ms", "5", "--request-rate", "5", "-dp", "2"), "leave --data-parallel-size out"),
        (("--plot", "picture.gif"), "--plot 'picture.gif' must end in one of .png, .svg, .pdf"),
        (("--plot", "nowhere/at/all.png"), "there is no folder 'nowhere/at'"),
        (("--trace", "nowhere.jsonl"), "--trace 'nowhere.jsonl' cannot be read"),
        (("-tp", "1", "2", "4", "--request-rate", *map(str, range(1, 30))), "87 combinations"),
        (("--enable-expert-parallel",), "has no experts"),
    ],
)
def test_a_wrong_value_is_one_line(
    arguments: tuple[str, ...], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "--model", model, *arguments)
    assert status == 1 and not out and err.count("\n") == 1 and words in err


def test_a_model_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--model", "./nothing/here")
    assert status == 1 and "no such folder or file" in err
