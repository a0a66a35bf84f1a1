"""How near `quire simulate` comes to what was measured on an H200: every figure beside its prediction.

    python -m benchmarks.gpu.calibrate [--write] [--models 8B] [--loads single,bs32,rate] [--again]

Measured: benchmarks/gpu/offline.json (workloads of offline.py) and serving.json (loads of a server); with `--again`
serving_again.json, 30B-A3B in another sitting three days later, at another commit. `--write` puts all into
calibration.json (calibration_again.json), which docs/features/simulate.md quotes and a test checks.

The rates of the H200 in quire/simulate/devices.py were fitted by coordinate descent to single, bs32, prefill, long
and mixed256; the bandwidth of shared keys to prefix of 0.6B and 8B; how steps of some hundred tokens grow, to
captured ones of 8B (docs/log.md, 2026-11-16). Times of processors were measured, or set by hand while looking at the
served loads of 0.6B and 8B and at 30B-A3B with one request at a time (docs/features/simulate.md). Strict predictions
are batch1k, 30B-A3B's prefix and its other served loads, and all of --again. Loads at a rate are drawn with several
seeds, of which the median counts (--draws shows how far apart they are), and stretched to the time over which
requests came in the measured run (SPANS): its arrivals were not recorded, but all servers and models of a sitting saw
the same. The load generator is simulated too: one processor, which takes its times when its turn comes.
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
from quire.sched.settings import SchedulerSettings
from quire.simulate.devices import DEVICES, ClientModel, HostModel
from quire.simulate.fleet import RequestRecord
from quire.simulate.scenario import Scenario, build_fleet
from quire.simulate.shape import read_shape
from quire.simulate.workload import FleetShare, SimulatedRequest, Workload

FOLDER = Path(__file__).parent
STORED, STORED_AGAIN = FOLDER / "calibration.json", FOLDER / "calibration_again.json"
SEEDS = range(7)
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
# Tokens of random weights are sometimes a part of a character, which goes out with the next token: 0.9% if all of the
# vocabulary are as likely, but more than 1% in all loads with one request at a time, where ITL p99 is two steps.
SERVER_HOST = replace(HostModel(), silent_share=0.02)
OFFLINE_HOST = replace(
    HostModel(),
    idle_seconds=0.0,
    request_seconds=0.0,
    accept_seconds=0.0,
    accept_turns=1,
    chunk_seconds=0.0,
    token_seconds=0.0,
)
CLIENT = ClientModel()
REST = 1.0  # seconds in which the server has nothing to do before a load
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_e2el_ms")
FIGURES = ("output_throughput", *LATENCIES)
# Whose figures the model's numbers were fitted to, or set by hand while looking at them.
OFFLINE_FITTED = ("single", "bs32", "prefill", "long", "mixed256")

NAMES = dict(
    zip(FIGURES, ("output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2EL p50"), strict=True)
)  # as the documentation calls them

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into calibration.json, or calibration_again.json")
    parser.add_argument("--again", action="store_true", help="what was measured again in another sitting")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--loads", default="", help="names, or beginnings of them; unset: all")
    parser.add_argument("--draws", type=int, default=0, help="instead: least, median and most among so many arrivals")
    options = parser.parse_args()
    models, loads = options.models.split(","), tuple(options.loads.split(",")) if options.loads else ("",)
    if options.draws:
        for text in draws(models, loads, options.draws):
            print(text, flush=True)
        return
    rows = []
    for row in again() if options.again else predictions(models, loads):
        rows.append(row)
        print(line(row), flush=True)
    print(f"{sum(map(is_within, rows))} of {len(rows)} within {THROUGHPUT_BOUND:.0%} (rates) and {LATENCY_BOUND:.0%}")
    if options.write:
        store(rows, STORED_AGAIN if options.again else STORED)


def predictions(models: list[str], loads: tuple[str, ...]) -> Iterator[Row]:
    """Every measured figure of these models and loads (by the beginnings of their names), with its prediction."""
    for entry in json.loads((FOLDER / "offline.json").read_text()):
        if entry["model"] in models and entry["work"].startswith(loads):
            value = predict_offline(entry["model"], entry["work"])
            yield compare(entry["model"], entry["work"], entry["unit"], entry["measured"], value)
    for entry in served("serving.json"):
        model, load = entry["model"].removeprefix("Qwen3-"), f"{entry['load']} {entry['value']}"
        if model in models and load.startswith(loads):
            figures = predict_served(model, entry["load"], entry["value"], entry["completed"])
            for name in FIGURES:
                yield compare(model, load, name, entry[name], figures[name])


def again() -> Iterator[Row]:
    """Figures of another sitting, each with what the first one measured and with its prediction."""
    first = {(entry["model"], entry["load"], entry["value"]): entry for entry in served("serving.json")}
    for entry in served("serving_again.json"):
        model, load, value = entry["model"], entry["load"], entry["value"]
        figures = predict_served(model.removeprefix("Qwen3-"), load, value, entry["completed"])
        for name in FIGURES:
            if name in entry:
                row = compare(model.removeprefix("Qwen3-"), f"{load} {value}", name, entry[name], figures[name])
                yield row | {"first": first[model, load, value][name], "fitted": False}


def served(name: str) -> list[dict[str, Any]]:
    return [entry for entry in json.loads((FOLDER / name).read_text()) if entry["server"] == "Quire"]


def store(rows: list[Row], path: Path) -> None:
    """Lay these over what the file holds."""
    stored = json.loads(path.read_text()) if path.exists() else []
    merged = {(row["model"], row["load"], row["figure"]): row for row in [*stored, *rows]}
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")


def compare(model: str, load: str, figure: str, measured: float, predicted: float) -> Row:
    return {
        "model": model, "load": load, "figure": figure, "measured": measured, "predicted": float(f"{predicted:.4g}"),
        "error": round(predicted / measured - 1, 3), "fitted": is_fitted(model, load, figure),
    }  # fmt: skip


def is_fitted(model: str, load: str, figure: str) -> bool:
    if load in OFFLINE_FITTED:
        return True
    if model == "30B-A3B":
        return load == "at once 1" or (load.startswith("rate") and figure not in LATENCIES)  # as many as came
    return load != "batch1k"


def is_within(row: Row) -> bool:
    return bool(abs(row["error"]) <= (LATENCY_BOUND if row["figure"] in LATENCIES else THROUGHPUT_BOUND))


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
    names = ("model", "load", *NAMES.values())
    heads = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    return "\n".join(["| model | workload | of | |", "|---|---|---|---|", *offline, "", heads, *served])


def again_table(rows: list[Row]) -> str:
    """For the same page: what two sittings measured, by how much they differ, and the prediction for the second."""
    lines = [
        f"| {row['load']} | {NAMES[row['figure']]} | {row['first']:,g} | {row['measured']:,g} "
        f"| {row['measured'] / row['first'] - 1:+.0%} | {cell(row)} |"
        for row in rows
    ]
    heads = "| load | figure | first | again | differ | again → predicted |\n|---|---|---|---|---|---|"
    return "\n".join([heads, *lines])


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
        memory_utilization=SHARES[model], client=CLIENT,
    )  # fmt: skip
    requests = workload.draw(number, ALONE)
    if kind == "at once":
        return build_fleet(scenario)[0].run([r._replace(arrival=REST) for r in requests], value)
    first, last = requests[0].arrival, requests[-1].arrival
    stretch = (SPANS_30B if model == "30B-A3B" else SPANS)[value] / (last - first)
    return build_fleet(scenario)[0].run([r._replace(arrival=REST + (r.arrival - first) * stretch) for r in requests])


def draws(models: list[str], loads: tuple[str, ...], number: int) -> Iterator[str]:
    """How much the figures of loads at a rate depend on when requests happen to come."""
    for entry in served("serving.json"):
        model, kind, value = entry["model"].removeprefix("Qwen3-"), entry["load"], entry["value"]
        if kind != "rate" or model not in models or not f"{kind} {value}".startswith(loads):
            continue
        runs = [bench_figures(serve(model, kind, value, entry["completed"], seed)) for seed in range(number)]
        for name in LATENCIES:
            drawn = [run[name] for run in runs]
            middle = median(drawn)
            near = sum(abs(one / middle - 1) <= LATENCY_BOUND for one in drawn) / number
            yield (
                f"| {model} | {kind} {value} | {NAMES[name]} | {entry[name]:g} | {min(drawn):.4g} | {middle:.4g} "
                f"| {max(drawn):.4g} | {near:.0%} |"
            )


def bench_figures(records: list[RequestRecord]) -> dict[str, float]:
    ttft = sorted(record.ttft for record in records)
    gaps = sorted(gap for record in records for gap in record.gaps)
    whole = sorted(record.last - record.start for record in records)
    seconds = max(record.last for record in records) - min(record.start for record in records)
    return {
        "output_throughput": sum(record.num_tokens for record in records) / seconds,
        "median_ttft_ms": 1e3 * quantile(ttft, 0.5),
        "p99_ttft_ms": 1e3 * quantile(ttft, 0.99),
        "median_itl_ms": 1e3 * quantile(gaps, 0.5),
        "p99_itl_ms": 1e3 * quantile(gaps, 0.99),
        "median_e2el_ms": 1e3 * quantile(whole, 0.5),
    }


def quantile(values: list[float], share: float) -> float:
    """As the load generator took it: of up to 100 values, the 0.99 one is the largest."""
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
