"""Further ways to run a server: inside one process, with a logging file, with a profiler, with the embedded model."""

from __future__ import annotations

import gzip
import json

from tests.server.hosted import completion, hosted


def test_everything_in_one_process(tmp_path):
    with hosted(tmp_path, "--disable-frontend-multiprocessing") as server:
        assert server.children() == []
        assert server.complete("abc", 5).json()["choices"][0]["text"] == "abcab"
        server.signal(15)
        assert server.wait() == 0


def test_a_logging_file_decides_everything(tmp_path):
    target = tmp_path / "lines"
    config = {
        "version": 1,
        "formatters": {"plain": {"format": "%(name)s|%(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(target), "formatter": "plain"}},
        "loggers": {
            "quire": {"handlers": ["file"], "level": "INFO", "propagate": False},
            "uvicorn": {"handlers": ["file"], "level": "INFO", "propagate": False},
        },
    }
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(config))
    from tests.fake_engine import write_model
    from tests.server.hosted import started, wait_until

    with started(write_model(tmp_path / "m"), "--port", "0", "--log-config-file", str(path)) as server:
        wait_until(lambda: target.exists() and "Listening at" in target.read_text(), 60)
        url = target.read_text().split("Listening at ")[1].split()[0].replace("//0.0.0.0:", "//127.0.0.1:")
        server.url = url
        assert server.get("/health").status_code == 200
        assert "quire.engine.start|Engine ready" in target.read_text()  # the engine's process writes there too
        assert "uvicorn.access|" in target.read_text()
    path.write_text("{")
    with started(write_model(tmp_path / "m"), "--port", "0", "--log-config-file", str(path)) as wrong:
        assert wrong.wait() == 1 and "cannot be read as JSON" in wrong.lines[-1]


def test_the_embedded_model_and_a_profile_of_it(tmp_path):
    about = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False})
    with hosted(
        None, "--dtype", "float32", "--profiler-config", about, "--api-server-count", "2", fake=False
    ) as server:
        assert server.wait_for_line(r"Quire .*: SmolLM2-135M-Instruct .*float32 on cpu, context 8192")
        body = completion("The capital of France is", 4)
        texts = {server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(6)}
        assert len(texts) == 1 and "Paris" in texts.pop()
        assert server.post("/stop_profile").status_code == 400  # none was started
        assert server.post("/start_profile").status_code == 200
        assert "already" in server.post("/start_profile").json()["error"]["message"]
        server.post("/v1/completions", body)
        assert server.post("/stop_profile").status_code == 200
        (trace,) = tmp_path.glob("*.pt.trace.json.gz")
        with gzip.open(trace) as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        assert any(name.startswith("aten::") for name in names)
        assert server.post("/reset_prefix_cache").status_code == 404  # only in development mode
        server.signal(15)
        assert server.wait() == 0
