"""`quire bench latency`, `throughput` and `startup` over an engine without a model: what is asked, printed, stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench import latency, result_file, startup, throughput
from quire.cli import bench
from quire.schema.errors import ConfigError, InputError, NotBuiltError, QuireError
from tests.fake_engine import use_fake, write_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_fake(monkeypatch)
    return write_model(tmp_path / "model")


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    flags = ["--model", model, "--input-len", "4", "--output-len", "6", "--batch-size", "3", "--num-iters", "4"]
    assert latency.main([*flags, "--num-iters-warmup", "1", "--output-json", str(path)], "x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Avg latency: ") and lines[0].endswith(" seconds")
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"{share}% percentile latency" for share in (10, 25, 50, 75, 90, 99)
    ]
    found = json.loads(path.read_text())
    assert set(found) == {"avg_latency", "latencies", "percentiles"}
    assert len(found["latencies"]) == 4 and set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)


def test_latency_runs_the_same_full_batch_each_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[Any] = []
    real = latency.LLM.generate

    def generate(self: Any, prompts: Any, params: Any, **rest: Any) -> Any:
        outputs = real(self, prompts, params, **rest)
        rounds.append((prompts, [len(output.outputs[0].token_ids) for output in outputs]))
        assert not self.llm_engine.vllm_config.cache_config.enable_prefix_caching
        return outputs

    monkeypatch.setattr(latency.LLM, "generate", generate)
    flags = ["--model", model, "--input-len", "4", "--output-len", "6", "--batch-size", "3", "--num-iters", "2"]
    latency.main([*flags, "--num-iters-warmup", "2"], "x")
    assert len(rounds) == 4
    assert all(one == rounds[0] for one in rounds)
    assert rounds[0][1] == [6, 6, 6] and len(rounds[0][0][0]["prompt_token_ids"]) == 4


@pytest.mark.parametrize("engine", [[], ["--async-engine"]])
def test_throughput(model: str, engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    flags = ["--model", model, "--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "3"]
    assert throughput.main([*flags, *engine, "--disable-tqdm", "--output-json", str(path)], "x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Throughput: ") and " requests/s, " in lines[0] and lines[0].endswith(" output tokens/s")
    assert lines[1:] == ["Total num prompt tokens:  35", "Total num output tokens:  15"]
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["total_num_tokens"]) == (5, 50)
    assert found["requests_per_second"] == pytest.approx(5 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(50 / found["elapsed_time"])


def test_throughput_of_chats(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", model, "--num-prompts", "2", "--random-input-len", "7", "--random-output-len", "3"]
    assert throughput.main([*flags, "--backend", "vllm-chat", "--disable-tqdm"], "x") == 0
    around = len("user:;assistant:")
    assert f"Total num prompt tokens:  {2 * (7 + around)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, flags, error",
    [
        (latency, ["--batch-size", "0"], InputError),
        (latency, ["--num-iters", "0"], InputError),
        (throughput, ["--n", "0"], InputError),
        (throughput, ["--backend", "hf"], SystemExit),
        (throughput, ["--dataset-name", "poems"], InputError),
        (throughput, ["--dataset-name", "burstgpt"], NotBuiltError),
        (throughput, ["--async-engine", "--backend", "vllm-chat"], InputError),
        (startup, ["--cold", "--warm"], ConfigError),
        (startup, ["--num-iters-cold", "-1"], InputError),
        (startup, ["--warm", "--num-iters-warm", "0"], InputError),
        (startup, ["--max-model-len", "99999"], InputError),
    ],
)
def test_wrong_flags(command: Any, flags: list[str], error: type[BaseException], model: str) -> None:
    with pytest.raises(error):
        command.main(["--model", model, *flags], "x")


@pytest.mark.parametrize(("flags", "message"), [
    (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
    (["--input-len", "0"], "--random-input-len must be at least 1, got 0"),
    (["--random-range-ratio", "2"], "below 1"),
    (["--dataset-name", "sharegpt"], "needs --dataset-path"),
    (["--dataset-name", "custom", "--dataset-path", "/no/such/file"], "No such file"),
])  # fmt: skip
def test_a_wrong_dataset_is_told_before_a_model_is_loaded(
    flags: list[str], message: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "LLM", lambda **_: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=message):
        throughput.main(["--model", model, *flags], "x")


@pytest.mark.parametrize("command", [latency, throughput, startup])
def test_a_place_that_cannot_be_written_is_told_before_the_run(
    command: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = "Runner" if command is startup else "LLM"
    monkeypatch.setattr(command, started, lambda *_, **__: pytest.fail("an engine was started"))
    for place, reason in ((tmp_path / "no" / "x.json", f"there is no folder '{tmp_path}/no'"), (tmp_path, "a folder")):
        with pytest.raises(InputError, match=f"^--output-json '{place}': .*{reason}$"):
            command.main(["--model", model, "--output-json", str(place)], "x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_result_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^--output-json '/dev/full': No space left on device$"):
        result_file.write_json("/dev/full", {"x": 1})


def test_engine_options_are_passed_on_as_written() -> None:
    ours = ["--num_iters_cold", "2", "--cold", "--output-json=x.json", "--evict-weights"]
    theirs = ["--model", "m", "--max_model_len=512", "--no-enable-prefix-caching", "-O0"]
    assert startup._without_ours([*ours[:2], *theirs, *ours[2:]]) == theirs


def start(total: float, load: float, weights: float) -> startup.Start:
    phases = [("interpreter", 0.5, ""), ("weights", weights, "load"), ("load", load, ""), ("first token", 0.25, "")]
    return startup.Start(phases, total, total - 0.25, "path")


def test_the_table_of_phases() -> None:
    lines = startup.table({"cold": [start(4.0, 2.0, 1.0), start(6.0, 4.0, 3.0)], "warm": [start(2.0, 1.0, 0.5)]})
    assert lines[0].split() == ["phase,", "average", "seconds", "cold", "(2)", "warm", "(1)"]
    rows = [line.rsplit(maxsplit=2) for line in lines[1:] if not line.startswith("-")]
    assert rows == [
        ["interpreter", "0.500", "0.500"], ["load", "3.000", "1.000"], ["  weights", "2.000", "0.500"],
        ["first token", "0.250", "0.250"], ["ready", "4.750", "1.750"], ["to the first token", "5.000", "2.000"],
        ["  least", "4.000", "2.000"], ["  most", "6.000", "2.000"],
    ]  # fmt: skip
    found = startup.result({"cold": [start(4.0, 2.0, 1.0), start(6.0, 4.0, 3.0)]})
    assert found["avg_cold_startup_time"] == 4.75 and found["cold_startup_times"] == [3.75, 5.75]
    assert found["cold_phases"]["load/weights"] == 2.0 and set(found["cold_startup_percentiles"]) >= {"50", "99"}


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "CHILD", "no.such.module")
    with pytest.raises(QuireError, match=r"exit status 1:\n.*no\.such|No module named"):
        startup.Runner([], tmp_path).warm()


def test_cold_starts_get_empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def run(self: startup.Runner, changes: dict[str, str]) -> startup.Start:
        seen.append(changes)
        assert all(not Path(folder).exists() and Path(folder).parent.exists() for folder in changes.values())
        return start(1, 1, 1)

    monkeypatch.setattr(startup.Runner, "_run", run)
    runner = startup.Runner([], tmp_path)
    for _ in range(2):
        runner.cold(evict=False)
    runner.warm()
    assert set(seen[0]) >= {"QUIRE_CACHE_ROOT", "TRITON_CACHE_DIR"}
    assert seen[0] != seen[1] and seen[2] == {}


def test_the_table_of_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.bench([], "quire bench") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:7]] == list(bench.BENCHMARKS)
    assert bench.bench(["sevre"], "quire bench") == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err
    assert bench.bench(["sweep"], "quire bench") == 2
    assert "not built yet" in capsys.readouterr().err
    for name in bench.BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            bench.bench([name, "--help"], "quire bench")
        assert ended.value.code == 0
        assert f"usage: quire bench {name}" in capsys.readouterr().out
