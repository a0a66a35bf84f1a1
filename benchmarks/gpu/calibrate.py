"""How near `quire simulate` comes to what was measured on an H200: every figure beside its prediction.

    python benchmarks/gpu/calibrate.py [--write] [--models 8B] [--loads single,bs32,rate]

Measured: benchmarks/gpu/offline.json (workloads of offline.py) and serving.json (loads of a server). `--write` puts all
into benchmarks/gpu/calibration.json, which docs/features/simulate.md quotes and a test checks.

The rates of the H200 in quire/simulate/devices.py were fitted by coordinate descent to single, bs32, prefill, long and
mixed256; the bandwidth of shared keys to prefix of 0.6B and 8B; the host's times were set by hand while looking at the
served loads of 0.6B and 8B. Strict predictions are batch1k, and 30B-A3B's prefix and served loads. Loads at a rate are
drawn with several seeds, of which the median counts, and stretched to the time over which requests came in
the measured run (SPANS): its arrivals were not recorded, but all servers and models of a sitting saw the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.models import MODELS
from quire.bench.report import percentile
from quire.sched.settings import SchedulerSettings
from quire.simulate.devices import DEVICES, HostModel
from quire.simulate.fleet import RequestRecord
from quire.simulate.scenario import Scenario, build_fleet
from quire.simulate.shape import read_shape
from quire.simulate.workload import FleetShare, SimulatedRequest, Workload

FOLDER = Path(__file__).parent
STORED = FOLDER / "calibration.json"
SEEDS = (0, 1, 2)
ALONE = FleetShare(1, 1, True)
THROUGHPUT_BOUND, LATENCY_BOUND = 0.10, 0.15
SHAPES = {name: read_shape(MODELS[f"qwen3-{name.lower()}"], f"Qwen3-{name}") for name in ("0.6B", "8B", "30B-A3B")}
# Seconds from the first to the last arrival, by rate: requests times their tokens over the measured tokens a second of
# 0.6B, less its time from end to end, which is short. 30B-A3B was measured in another sitting, with other arrivals.
SPANS = {1: 12.07, 5: 5.62, 10: 5.17, 20: 12.66, 40: 5.34, 80: 6.2}
SPANS_30B = {10: 10.0}
# Share of the GPU's memory that a server had. The servers shared the GPU by fixed parts that were not recorded: 8B's is
# the one that fits its load of 80 a second, where the KV cache is full; the others never fill theirs.
SHARES = {"0.6B": 0.15, "8B": 0.3, "30B-A3B": 0.9}
# Tokens of random weights are often a part of a character, which goes out with the next token.
SERVER_HOST = replace(HostModel(), silent_share=0.02)
OFFLINE_HOST = replace(
    HostModel(), idle_seconds=0.0, request_seconds=0.0, accept_seconds=0.0, chunk_seconds=0.0, token_seconds=0.0
)
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_e2el_ms")
# Whose figures the model's numbers were fitted to, or set by hand while looking at them.
OFFLINE_FITTED = ("single", "bs32", "prefill", "long", "mixed256")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into calibration.json")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--loads", default="", help="names, or beginnings of them; unset: all")
    options = parser.parse_args()
    models, loads = options.models.split(","), tuple(options.loads.split(",")) if options.loads else ("",)
    rows = []
    for row in predictions(models, loads):
        rows.append(row)
        print(line(row), flush=True)
    print(f"{sum(map(is_within, rows))} of {len(rows)} within {THROUGHPUT_BOUND:.0%} (rates) and {LATENCY_BOUND:.0%}")
    if options.write:
        store(rows)


def predictions(models: list[str], loads: tuple[str, ...]) -> Iterator[Row]:
    """Every measured figure of these models and loads (by the beginnings of their names), with its prediction."""
    for entry in json.loads((FOLDER / "offline.json").read_text()):
        if entry["model"] in models and entry["work"].startswith(loads):
            value = predict_offline(entry["model"], entry["work"])
            yield compare(entry["model"], entry["work"], entry["unit"], entry["measured"], value)
    for entry in json.loads((FOLDER / "serving.json").read_text()):
        model, load = entry["model"].removeprefix("Qwen3-"), f"{entry['load']} {entry['value']}"
        if entry["server"] == "Quire" and model in models and load.startswith(loads):
            figures = predict_served(model, entry["load"], entry["value"], entry["completed"])
            for name in ("output_throughput", *LATENCIES):
                yield compare(model, load, name, entry[name], figures[name])


def store(rows: list[Row]) -> None:
    """Lay these over what calibration.json holds."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else []
    merged = {(row["model"], row["load"], row["figure"]): row for row in [*stored, *rows]}
    STORED.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")


def compare(model: str, load: str, figure: str, measured: float, predicted: float) -> Row:
    return {
        "model": model, "load": load, "figure": figure, "measured": measured, "predicted": float(f"{predicted:.4g}"),
        "error": round(predicted / measured - 1, 3), "fitted": is_fitted(model, load, figure),
    }  # fmt: skip


def is_fitted(model: str, load: str, figure: str) -> bool:
    if load in OFFLINE_FITTED:
        return True
    if model == "30B-A3B":
        return load.startswith("rate") and figure not in LATENCIES  # as many as came
    return load != "batch1k"


def is_within(row: Row) -> bool:
    return abs(row["error"]) <= (LATENCY_BOUND if row["figure"] in LATENCIES else THROUGHPUT_BOUND)


def line(row: Row) -> str:
    mark = "" if is_within(row) else " *"
    return (
        f"| {row['model']} | {row['load']} | {row['figure']} | {row['measured']:g} | {row['predicted']:g} "
        f"| {row['error']:+.1%}{mark} | {'fitted' if row['fitted'] else ''} |"
    )


def page_table(rows: list[Row]) -> str:
    """For docs/features/simulate.md: a line per load, `measured → predicted`, in bold where it is out of bounds."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["load"]), []).append(row)
    offline = [
        f"| {model} | {load} | {row['figure']} | {cell(row)} |"
        for (model, load), (row, *rest) in lines.items()
        if not rest
    ]
    served = [
        f"| {model} | {load} | {' | '.join(map(cell, many))} |" for (model, load), many in lines.items() if many[1:]
    ]
    names = ("model", "load", "output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2EL p50")
    heads = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    return "\n".join(["| model | workload | of | |", "|---|---|---|---|", *offline, "", heads, *served])


def cell(row: Row) -> str:
    text = f"{row['measured']:,g} → {row['predicted']:,g} ({row['error']:+.0%})"
    return text if is_within(row) else f"**{text}**"


# ---- offline ------------------------------------------------------------------------------------------------------


def offline_rounds(work: str) -> list[list[SimulatedRequest]]:
    """The requests of a workload of offline.py, round by round."""
    at_once = SimulatedRequest
    if work == "mixed256":
        return [mixed_requests()]
    if work == "prefix":
        return [[at_once(0, 8008, 1, 0, 8000)], [at_once(0, 8064, 32, 0, 8000)] * 128]
    number, prompt, output = {
        "batch1k": (1000, 512, 128), "prefill": (128, 2048, 1), "single": (1, 128, 256), "bs32": (32, 128, 256),
        "long": (32, 8000, 256),
    }[work]  # fmt: skip
    return [[at_once(0, prompt, output)] * number]


def mixed_requests() -> list[SimulatedRequest]:
    """The lengths that offline.py draws for mixed256 as its first workload: ids come from the same generator."""
    rng = random.Random(0)

    def skip_ids(count: int) -> int:
        for _ in range(count):
            rng.randrange(10, 150_000)
        return count

    for count in (128, *[64] * 8):
        skip_ids(count)
    prompts = [skip_ids(rng.randint(100, 1024)) for _ in range(256)]
    return [SimulatedRequest(0, prompt, rng.randint(100, 1024)) for prompt in prompts]


def predict_offline(model: str, work: str) -> float:
    """Seconds of `prefix` and `long`; all tokens a second of `prefill`, output tokens a second of others."""
    settings = SchedulerSettings(max_model_len=10240, max_num_batched_tokens=16384, max_num_seqs=1024)
    scenario = Scenario(shape=SHAPES[model], device=DEVICES["H200"], host=OFFLINE_HOST, settings=settings)
    fleet, _ = build_fleet(scenario)
    seconds, tokens = 0.0, 0
    for requests in offline_rounds(work):
        before = max((record.last for record in fleet.records), default=0.0)
        fleet.run([request._replace(arrival=before) for request in requests])
        seconds = max(record.last for record in fleet.records) - before
        tokens = sum(request.output_tokens + (work == "prefill") * request.prompt_tokens for request in requests)
    return seconds if work in ("prefix", "long") else tokens / seconds


# ---- served -------------------------------------------------------------------------------------------------------


def predict_served(model: str, kind: str, value: int, number: int) -> dict[str, float]:
    """As the load generator of serving.py counts: every request, from the first to the last token of all."""
    runs = [bench_figures(serve(model, kind, value, number, seed)) for seed in (SEEDS if kind == "rate" else SEEDS[:1])]
    return {name: median(run[name] for run in runs) for name in runs[0]}


def serve(model: str, kind: str, value: int, number: int, seed: int) -> list[RequestRecord]:
    settings = SchedulerSettings(
        max_model_len=4096, max_num_batched_tokens=8192, max_num_seqs=1024, latency_goal=0.012, max_num_queued=10_000
    )
    workload = Workload(input_len=512, output_len=128, seed=seed, **({"rate": value} if kind == "rate" else {}))
    scenario = Scenario(
        shape=SHAPES[model], device=DEVICES["H200"], host=SERVER_HOST, settings=settings, workload=workload,
        memory_utilization=SHARES[model],
    )  # fmt: skip
    requests = workload.draw(number, ALONE)
    if kind == "at once":
        return build_fleet(scenario)[0].run(requests, value)
    first, last = requests[0].arrival, requests[-1].arrival
    stretch = (SPANS_30B if model == "30B-A3B" else SPANS)[value] / (last - first)
    return build_fleet(scenario)[0].run([r._replace(arrival=(r.arrival - first) * stretch) for r in requests])


def bench_figures(records: list[RequestRecord]) -> dict[str, float]:
    ttft = sorted(record.ttft for record in records)
    gaps = sorted(gap for record in records for gap in record.gaps)
    whole = sorted(record.last - record.start for record in records)
    seconds = max(record.last for record in records) - min(record.start for record in records)
    return {
        "output_throughput": sum(record.num_tokens for record in records) / seconds,
        "median_ttft_ms": 1e3 * percentile(ttft, 50),
        "p99_ttft_ms": 1e3 * percentile(ttft, 99),
        "median_itl_ms": 1e3 * percentile(gaps, 50),
        "p99_itl_ms": 1e3 * percentile(gaps, 99),
        "median_e2el_ms": 1e3 * percentile(whole, 50),
    }


if __name__ == "__main__":
    main()
