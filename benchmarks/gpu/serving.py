"""Running servers under the same loads, one after another: latencies and throughput side by side, and drawn over rates.

    python benchmarks/gpu/serving.py --server quire=http://127.0.0.1:8801 --server vllm=http://127.0.0.1:8802 \\
        --model NAME --tokenizer FOLDER [--at-once 256 32 1] [--rates 1 5 10 20 40 80] [--seconds 15] --into FILE
    python benchmarks/gpu/serving.py --from FILE --draw docs/gpu-serving.png

Every load is `quire bench serve` with random prompts (512 tokens in, 128 out, temperature 0.8, the end of text
ignored): so many requests at once, or Poisson arrivals at a rate for some seconds. Servers that are up but idle do not
disturb each other; both may lie on one GPU if their memory is divided. A later call adds to what FILE holds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KEPT = (
    "completed", "failed", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms",
    "median_e2el_ms",
)  # fmt: skip
DRAWN = {
    "p99_ttft_ms": "time to first token, p99 (ms)",
    "p99_itl_ms": "between tokens, p99 (ms)",
    "output_throughput": "output tokens/s",
}
ROUNDS = {1: 8, 32: 4, 256: 2}  # requests of a load, in requests at once


def main() -> None:
    asked = options()
    path = Path(asked.into or asked.source)
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for name, url in (server.split("=", 1) for server in asked.server):
        for load in [*(("at once", n) for n in asked.at_once), *(("rate", r) for r in asked.rates)]:
            about = {"model": asked.title or asked.model, "server": name, "load": load[0], "value": load[1]}
            found.append(about | measure(url, load, asked))
            path.write_text(json.dumps(found, indent=1))
            print(line(found[-1]), flush=True)
    if asked.draw:
        draw(found, asked.draw)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--model", default="m", help="as the servers call it")
    parser.add_argument("--title", help="of its row in the picture; else --model")
    parser.add_argument("--tokenizer", help="its folder")
    parser.add_argument("--at-once", nargs="*", type=int, default=[256, 32, 1])
    parser.add_argument("--rates", nargs="*", type=float, default=[1, 5, 10, 20, 40, 80], help="requests a second")
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals at each rate")
    parser.add_argument("--tokens", nargs=2, type=int, default=[512, 128], metavar=("IN", "OUT"))
    parser.add_argument("--into", help="file of figures to write, or to add to")
    parser.add_argument("--from", dest="source", help="file of figures to draw")
    parser.add_argument("--draw", help="picture to write")
    asked = parser.parse_args()
    if not (asked.into or asked.source):
        parser.error("--into FILE or --from FILE says where the figures are")
    return asked


def measure(url: str, load: tuple[str, float], asked: argparse.Namespace) -> dict[str, Any]:
    kind, value = load
    if kind == "rate":
        number, shape = max(8, round(value * asked.seconds)), ["--request-rate", f"{value:g}"]
    else:
        number, shape = int(value) * ROUNDS.get(int(value), 4), ["--max-concurrency", f"{value:g}"]
    tokens_in, tokens_out = map(str, asked.tokens)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "quire.cli.main", "bench", "serve", "--base-url", url, "--model", asked.model,
            *(["--tokenizer", asked.tokenizer] if asked.tokenizer else []), "--dataset-name", "random",
            "--random-input-len", tokens_in, "--random-output-len", tokens_out, "--num-prompts", str(number), *shape,
            "--temperature", "0.8", "--ignore-eos", "--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles",
            "50,99", "--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "r.json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "r.json").read_text())
    return {name: result[name] for name in KEPT}


def line(found: dict[str, Any]) -> str:
    ttft, itl = (f"{found[f'median_{name}_ms']:.1f} / {found[f'p99_{name}_ms']:.1f}" for name in ("ttft", "itl"))
    return (
        f"| {found['server']} | {found['load']} {found['value']:g} | {found['output_throughput']:.0f} | {ttft} | {itl} "
        f"| {found['median_e2el_ms']:.0f} | {found['failed']} |"
    )


def draw(found: list[dict[str, Any]], png: str) -> None:
    plt = importlib.import_module("matplotlib.pyplot")  # not needed where servers are measured
    rates = {(row["model"], row["value"]) for row in found if row["load"] == "rate"}
    models = [m for m in dict.fromkeys(row["model"] for row in found) if sum(m == model for model, _ in rates) > 1]
    size = (4.2 * len(DRAWN), 3.4 * len(models))
    figure, axes = plt.subplots(len(models), len(DRAWN), figsize=size, layout="constrained", squeeze=False)
    for model, row in zip(models, axes, strict=True):
        for axis, (name, title) in zip(row, DRAWN.items(), strict=True):
            draw_one(axis, [point for point in found if point["model"] == model and point["load"] == "rate"], name)
            axis.set(xscale="log", xlabel="requests a second", title=f"{model}: {title}")
            ticks = sorted(value for named, value in rates if named == model)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
    figure.savefig(png, dpi=120)


def draw_one(axis: Any, points: list[dict[str, Any]], name: str) -> None:
    for server in dict.fromkeys(point["server"] for point in points):
        line = sorted((point["value"], point[name]) for point in points if point["server"] == server)
        axis.plot(*zip(*line, strict=True), marker="o", label=server)
    axis.set_ylim(bottom=0)
    axis.legend()


if __name__ == "__main__":
    main()
