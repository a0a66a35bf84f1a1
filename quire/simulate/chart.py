"""Simulations as a picture: latencies and goodput over request rates, a line per topology, or bars where one rate is.

Needs matplotlib (the extra `bench`), which is loaded when a picture is requested. Must not know: how figures were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.base.registry import load
from quire.bench.plot import require
from quire.bench.result_file import check_place, written_to
from quire.schema.errors import InputError
from quire.simulate.scenario import Simulation

FORMATS = (".png", ".svg", ".pdf")
_PANELS = {
    "ttft_p99": "time to first token, p99 (ms)",
    "itl_p99": "inter-token latency, p99 (ms)",
    "goodput": "goodput (requests/s)",
}
_INCHES = (4.4, 3.8)  # of a panel


def check_path(path: str) -> Path:
    """Fail before the simulation, not after it."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path!r} must end in one of {', '.join(FORMATS)}", param="plot", value=path)
    check_place("--plot", path)
    require()
    return target


def draw_chart(simulations: Sequence[Simulation], path: Path) -> None:
    figure = load("matplotlib.figure:Figure")(figsize=(_INCHES[0] * len(_PANELS), _INCHES[1]), layout="constrained")
    axes = figure.subplots(1, len(_PANELS))
    rates = {simulation.scenario.workload.rate for simulation in simulations}
    for axis, (name, title) in zip(axes, _PANELS.items(), strict=True):
        if len(rates) > 1:
            _lines(axis, simulations, name)
        else:
            _bars(axis, simulations, name)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    scenario = simulations[0].scenario
    figure.suptitle(f"{scenario.shape.name} on {scenario.device.name}, simulated")
    with written_to("--plot", path):
        figure.savefig(path, dpi=120)


def _lines(axis: Any, simulations: Sequence[Simulation], name: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for simulation in simulations:
        point = simulation.scenario.workload.rate, getattr(simulation.figures, name)
        lines.setdefault(_label(simulation), []).append(point)
    for label, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axis.set_xlabel("requests/s")
    axis.legend(fontsize="small")


def _bars(axis: Any, simulations: Sequence[Simulation], name: str) -> None:
    labels = [_label(simulation) for simulation in simulations]
    axis.bar(range(len(labels)), [getattr(simulation.figures, name) for simulation in simulations])
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize="small")


def _label(simulation: Simulation) -> str:
    topology = simulation.scenario.topology
    return f"{topology} ({topology.num_devices} devices)"
