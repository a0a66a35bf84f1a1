"""`quire bench serve|latency|throughput|startup`: the table of benchmarks; quire/bench has the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.dispatch import Command, CommandTable

BENCHMARKS = CommandTable(
    "benchmark",
    {
        "serve": Command("quire.bench.serve:main", "load a running server: TTFT, TPOT, ITL, throughput, goodput"),
        "latency": Command("quire.bench.latency:main", "time one batch of requests, offline"),
        "throughput": Command("quire.bench.throughput:main", "time a complete dataset, offline"),
        "startup": Command("quire.bench.startup:main", "time start-up, phase by phase, cold and warm"),
    },
    later=("sweep", "mm-processor"),
)


def bench(arguments: Sequence[str], program: str) -> int:
    return BENCHMARKS.call(arguments, program)
