"""`quire bench serve|latency|throughput|startup`: a table of benches, each loaded when it is called."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from quire.base.registry import load

BENCHES = {
    "serve": ("quire.bench.serve:main", "load a running server: TTFT, TPOT, ITL, throughput, goodput"),
    "latency": ("quire.bench.latency:main", "time one batch of requests, offline"),
    "throughput": ("quire.bench.throughput:main", "time a whole dataset, offline"),
    "startup": ("quire.bench.startup:main", "time a start, phase by phase, cold and warm"),
}
LATER = ("sweep", "mm-processor")


def bench(arguments: Sequence[str], program: str) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(program))
        return 0
    name, rest = arguments[0], list(arguments[1:])
    if name not in BENCHES:
        print(f"{program}: {unknown(name)}", file=sys.stderr)
        return 2
    status: int = load(BENCHES[name][0])(rest, f"{program} {name}")
    return status


def usage(program: str) -> str:
    lines = [f"usage: {program} BENCH ...", "", "benches:"]
    lines += [f"  {name:<12}{summary}" for name, (_, summary) in BENCHES.items()]
    return "\n".join([*lines, "", f"'{program} BENCH --help' lists its options."])


def unknown(name: str) -> str:
    if name in LATER:
        return f"'{name}' is not built yet. Benches: {', '.join(BENCHES)}"
    near = difflib.get_close_matches(name, BENCHES, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown bench '{name}'{hint} Benches: {', '.join(BENCHES)}"
