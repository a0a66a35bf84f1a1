"""Puts `quire bench serve` beside guidellm, a public load tool, on the same server and the same load.

    python benchmarks/agreement.py --url http://127.0.0.1:8000 --tokenizer FOLDER --guidellm PATH [--rounds 3]

Both send requests at a constant rate, prompts and answers of one length, end-of-text ignored, in turns, so that drift
of the machine hits both. Printed are the medians of the rounds and their ratio. guidellm wants its own environment:
`python -m venv x && x/bin/pip install guidellm`; FOLDER is a Hugging Face tokenizer of the served model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

QUIRE = str(Path(sys.executable).parent / "quire")
NAMES = ("requests/s", "output tok/s", "TTFT mean", "TTFT median", "TPOT mean", "ITL mean", "E2EL mean", "E2EL median")


def ours(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    path = folder / "quire.json"
    command = [
        QUIRE, "bench", "serve", "--base-url", args.url, "--model", args.model, "--tokenizer", args.tokenizer,
        "--num-prompts", str(args.requests), "--random-input-len", str(args.input_len), "--random-output-len",
        str(args.output_len), "--request-rate", str(args.rate), "--burstiness", "inf", "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result", "--result-filename", str(path),
    ]  # fmt: skip
    run(command)
    found = json.loads(path.read_text())
    assert found["failed"] == 0
    figures = [
        found["request_throughput"], found["output_throughput"], found["mean_ttft_ms"], found["median_ttft_ms"],
        found["mean_tpot_ms"], found["mean_itl_ms"], found["mean_e2el_ms"], found["median_e2el_ms"],
    ]  # fmt: skip
    return dict(zip(NAMES, figures, strict=True))


def theirs(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    path = folder / "guidellm.json"
    backend = f"kind=openai_http,target={args.url},model={args.model},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={args.input_len},output_tokens={args.output_len}"
    command = [
        args.guidellm, "run", "--backend", backend, "--profile", f"kind=constant,rate={args.rate}", "--constraint",
        f"kind=max_requests,count={args.requests}", "--tokenizer", f"kind=hf_auto,model={args.tokenizer}", "--data",
        data, "--output", f"kind=json,path={path}", "--disable-progress",
    ]  # fmt: skip
    run(command)
    found = json.loads(path.read_text())["benchmarks"][0]
    metrics = {name: found["metrics"][name]["successful"] for name in WANTED}
    assert metrics["request_latency"]["count"] == args.requests
    # guidellm spreads the first token's time over its time per output token; the one without the first is its ITL
    inter = metrics["inter_token_latency_ms"]["mean"]
    ttft, latency = metrics["time_to_first_token_ms"], metrics["request_latency"]
    figures = [
        metrics["requests_per_second"]["mean"], metrics["output_tokens_per_second"]["mean"], ttft["mean"],
        ttft["median"], inter, inter, latency["mean"] * 1e3, latency["median"] * 1e3,
    ]  # fmt: skip
    return dict(zip(NAMES, figures, strict=True))


WANTED = (
    "requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms",
    "request_latency",
)  # fmt: skip


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stdout[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--guidellm", required=True, help="path of the guidellm command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"quire": [], "guidellm": []}
    with tempfile.TemporaryDirectory() as folder:
        ours(args, Path(folder))  # once unmeasured
        for _ in range(args.rounds):
            rounds["quire"].append(ours(args, Path(folder)))
            rounds["guidellm"].append(theirs(args, Path(folder)))
    print(f"{args.requests} requests at {args.rate:g} a second, {args.input_len} in, {args.output_len} out, "
          f"median of {args.rounds} rounds")  # fmt: skip
    print(f"{'':<16}{'quire':>12}{'guidellm':>12}{'ratio':>9}")
    for name in NAMES:
        mine, other = (statistics.median(one[name] for one in rounds[tool]) for tool in ("quire", "guidellm"))
        print(f"{name:<16}{mine:>12.3f}{other:>12.3f}{mine / other:>9.3f}")


if __name__ == "__main__":
    main()
