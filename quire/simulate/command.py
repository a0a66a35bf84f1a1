"""`quire simulate`: how a load would be served by so many devices, or how many devices it needs.

In: flags. Out: a table on stdout, or JSON; a picture where requested. The flags of the engine have the engine's names.
Must not know: how a simulation works.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from quire.base.registry import load
from quire.checkpoint.raw import read_raw
from quire.checkpoint.source import locate
from quire.config import FlexibleArgumentParser
from quire.config.resolve import GPU_BLOCK_SIZE, LATENCY_GOALS_MS, gpu_batch_defaults
from quire.sched.router import ROUTERS
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import InputError, NotBuiltError
from quire.simulate.chart import check_path, draw_chart
from quire.simulate.devices import DEVICES, DeviceModel, find_device
from quire.simulate.figures import LatencyGoals
from quire.simulate.scenario import Scenario, Simulation, simulate
from quire.simulate.search import find_smallest
from quire.simulate.shape import ModelShape, read_shape
from quire.simulate.topology import Topology
from quire.simulate.workload import Workload, read_trace

MOST_COMBINATIONS = 64
_QUEUED_REQUESTS = 10_000  # as a server's default
_TENSOR_SIZES = (1, 2, 4, 8)


def main(arguments: Sequence[str], program: str) -> int:
    parser = make_parser(program)
    args = parser.parse_args(arguments)
    target = None if args.plot is None else check_path(args.plot)
    scenarios = read_scenarios(args)
    simulations: list[Simulation] = []
    with _bar(None if args.find_devices else len(scenarios), args.disable_tqdm) as progress:
        for scenario in scenarios:
            if args.find_devices:
                simulations += find_smallest(scenario, _tensor_sizes(args), progress.update)
            else:
                simulations.append(simulate(scenario))
                progress.update()
    if not simulations:
        raise InputError("no topology of up to 10,000 devices keeps these goals: even without a queue it is too slow")
    if target is not None:
        draw_chart(simulations, target)
    print(json.dumps([summary(one) for one in simulations], indent=1) if args.json else table(simulations))
    return 0


def _bar(total: int | None, hidden: bool) -> Any:
    """Simulations; of a search it is not known how many there will be. Nothing where stderr is no terminal."""
    return load("tqdm:tqdm")(total=total, disable=hidden or None, unit=" simulations", dynamic_ncols=True)


def make_parser(program: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog=program, description="Predict how a load would be served, with the real scheduler and a cost model."
    )
    add = parser.add_argument_group("model and devices").add_argument
    add("--model", required=True, help="folder or hub id; only its configuration is read")
    add("--device", default="H200", help=f"{', '.join(DEVICES)}; only the H200 was measured (default: H200)")
    for name, short, text in (
        ("tensor", "tp", "ranks that share every layer"),
        ("pipeline", "pp", "stages of layers"),
        ("data", "dp", "replicas of the model"),
    ):
        add(f"--{name}-parallel-size", f"-{short}", type=int, nargs="+", default=None,
            help=f"{text}; several values are all tried (default: 1)")  # fmt: skip
    add("--enable-expert-parallel", action="store_true", help="experts on ranks of their own, within a replica")
    add(
        "--router",
        default="least-loaded",
        choices=list(ROUTERS),
        help="of requests to replicas (default: least-loaded)",
    )
    add("--simulated-replicas", type=int, default=4,
        help="of a larger fleet, so many replicas are simulated with their share of the load (default: 4)")  # fmt: skip
    _add_engine_flags(parser)
    _add_load_flags(parser)
    _add_goal_flags(parser)
    return parser


def _add_engine_flags(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--max-model-len", type=int, default=None, help="unset: what the load needs, at most the model's limit")
    add("--max-num-batched-tokens", type=int, default=None, help="tokens of a step; unset: as a server on this device")
    add("--max-num-seqs", type=int, default=None, help="requests that run at once; unset: as a server on this device")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of a device's memory (default: 0.9)")
    add("--inter-token-latency-goal-ms", type=float, default=LATENCY_GOALS_MS["cuda"],
        help=f"as the engine's (default: {LATENCY_GOALS_MS['cuda']:g})")  # fmt: skip
    add("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false", help="no prefix cache")


def _add_load_flags(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=float, nargs="+", default=[math.inf],
        help="requests a second, of the whole fleet; several values are all tried (default: inf)")  # fmt: skip
    add("--max-concurrency", type=int, default=None, help="requests at once, each as soon as another has ended")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier (default: 1.0)")
    add("--input-len", type=int, default=1024, help="prompt tokens besides the prefix (default: 1024)")
    add("--output-len", type=int, default=128, help="output tokens (default: 128)")
    add("--range-ratio", type=float, default=0.0, help="lengths vary by this share to both sides (default: 0.0)")
    add("--prefix-len", type=int, default=0, help="tokens at the start that prompts share (default: 0)")
    add("--num-prefixes", type=int, default=1, help="how many different ones there are (default: 1)")
    add("--num-requests", type=int, default=None, help="that the simulated replicas get; unset: what takes seconds")
    add("--trace", default=None, help="JSON lines with arrival, prompt_tokens, output_tokens and prefix_group instead")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")


def _add_goal_flags(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument_group("goals and output").add_argument
    add("--slo-ttft-ms", type=float, default=None, help="a good request's first token comes within this time")
    add("--slo-itl-ms", type=float, default=None, help="a good request's mean time between tokens is at most this")
    add("--slo-attainment", type=float, default=0.99, help="the share of requests that must be good (default: 0.99)")
    add("--find-devices", action="store_true", help="search for the fewest devices that keep the goals")
    add("--json", action="store_true", help="JSON instead of a table")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--plot", default=None, help="also draw a picture: a file name that ends in .png, .svg or .pdf")


def read_scenarios(args: Any) -> list[Scenario]:
    """Every combination that was requested; an error names the value that is wrong."""
    _check(args)
    device, trace = find_device(args.device), read_trace(args.trace) if args.trace else []
    located = locate(args.model, weights=False)
    if located.path.endswith(".gguf"):
        raise NotBuiltError(f"{args.model!r} is a GGUF file, whose steps the cost model cannot time yet", param="model")
    shape = read_shape(read_raw(located.path, "auto"), located.name)
    workloads = [
        Workload(
            rate=rate, burstiness=args.burstiness, input_len=args.input_len, output_len=args.output_len,
            range_ratio=args.range_ratio, prefix_len=args.prefix_len, num_prefixes=args.num_prefixes, seed=args.seed,
        )
        for rate in args.request_rate
    ]  # fmt: skip
    longest = max(r.prompt_tokens + r.output_tokens for r in trace) if trace else workloads[0].longest
    settings = _settings(args, device, shape, longest)
    return [
        Scenario(
            shape=shape, device=device, topology=topology, router=args.router, workload=workload, trace=trace,
            max_concurrency=args.max_concurrency, num_requests=args.num_requests, settings=settings,
            memory_utilization=args.gpu_memory_utilization, block_size=GPU_BLOCK_SIZE,
            most_replicas=args.simulated_replicas,
            goals=LatencyGoals(
                ttft=_seconds(args.slo_ttft_ms), itl=_seconds(args.slo_itl_ms), attainment=args.slo_attainment
            ),
        )
        for topology, workload in itertools.product(_topologies(args), workloads)
    ]  # fmt: skip


def _check(args: Any) -> None:
    for name, low in (("num_requests", 1), ("max_concurrency", 1), ("simulated_replicas", 1), ("max_num_seqs", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise InputError(f"--{name.replace('_', '-')} must be at least {low}, got {value}", param=name, value=value)
    for name in ("slo_ttft_ms", "slo_itl_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name.replace('_', '-')} must be above 0, got {value}", param=name, value=value)
    for name in ("slo_attainment", "gpu_memory_utilization"):
        if not 0 < (value := getattr(args, name)) <= 1:
            raise InputError(f"--{name.replace('_', '-')} must be in (0, 1], got {value}", param=name, value=value)
    if not 0 <= args.inter_token_latency_goal_ms < math.inf:
        raise InputError(f"--inter-token-latency-goal-ms must be at least 0, got {args.inter_token_latency_goal_ms}")
    if args.max_concurrency is not None and (args.trace or any(rate < math.inf for rate in args.request_rate)):
        raise InputError("--max-concurrency is a load of its own: leave --request-rate and --trace out")
    if args.find_devices:
        _check_search(args)


def _check_search(args: Any) -> None:
    if args.slo_ttft_ms is None and args.slo_itl_ms is None:
        raise InputError("--find-devices needs a goal: --slo-ttft-ms, --slo-itl-ms or both")
    if not args.trace and args.max_concurrency is None and any(rate == math.inf for rate in args.request_rate):
        raise InputError("--find-devices needs a load: --request-rate, --max-concurrency or --trace")
    if args.data_parallel_size is not None:
        raise InputError("--find-devices searches for the number of replicas: leave --data-parallel-size out")


def _topologies(args: Any) -> list[Topology]:
    if args.find_devices:
        sizes: list[tuple[int, int, int]] = [(1, (args.pipeline_parallel_size or [1])[0], 1)]
    else:
        lists = (args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size)
        sizes = list(itertools.product(*[values or [1] for values in lists]))
    if len(sizes) * len(args.request_rate) > MOST_COMBINATIONS:
        number = len(sizes) * len(args.request_rate)
        raise InputError(
            f"{number} combinations of sizes and rates were requested; at most {MOST_COMBINATIONS} are tried"
        )
    return [
        Topology(tensor_size=t, pipeline_size=p, data_size=d, has_expert_parallel=args.enable_expert_parallel)
        for t, p, d in sizes
    ]


def _tensor_sizes(args: Any) -> tuple[int, ...]:
    return tuple(args.tensor_parallel_size or _TENSOR_SIZES)


def _settings(args: Any, device: DeviceModel, shape: ModelShape, longest: int) -> SchedulerSettings:
    length = args.max_model_len
    if length is None:
        length = min(longest, shape.max_positions)
    elif not 2 <= length <= shape.max_positions:
        raise InputError(
            f"--max-model-len must be between 2 and the model's {shape.max_positions}, got {length}",
            param="max_model_len",
        )
    tokens, requests = gpu_batch_defaults(device.name, device.memory_bytes)
    return SchedulerSettings(
        max_model_len=length,
        max_num_batched_tokens=args.max_num_batched_tokens or tokens["OPENAI_API_SERVER"],
        max_num_seqs=args.max_num_seqs or requests,
        latency_goal=args.inter_token_latency_goal_ms / 1000,
        prefix_caching=args.enable_prefix_caching,
        max_num_queued=_QUEUED_REQUESTS,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# ---- what is shown ------------------------------------------------------------------------------------------------

_COLUMNS = (
    "topology", "devices", "requests/s", "good", "goodput/s", "output tok/s", "TTFT p50", "p99", "ITL p50", "p99",
    "E2EL p50", "p99", "busy", "cached",
)  # fmt: skip


def table(simulations: Sequence[Simulation]) -> str:
    """Latencies in milliseconds."""
    scenario = simulations[0].scenario
    rows = [_COLUMNS, *map(_row, simulations)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    source = "measured" if scenario.device.is_measured else "by its data sheet, not measured"
    many = [one for one in simulations if one.num_simulated < one.scenario.topology.data_size]
    notes = [f"{scenario.shape.name} on {scenario.device.name} ({source}); latencies in ms"]
    if many:
        notes.append(f"of larger fleets {many[0].num_simulated} replicas were simulated with their share of the load")
    if refused := sum(one.figures.num_refused for one in simulations):
        notes.append(f"{refused} simulated requests were refused: the queue was full")
    return "\n".join([*lines, *notes])


def _row(one: Simulation) -> tuple[str, ...]:
    figures = one.figures
    numbers = (
        figures.ttft_p50, figures.ttft_p99, figures.itl_p50, figures.itl_p99, figures.e2el_p50, figures.e2el_p99,
    )  # fmt: skip
    return (
        str(one.scenario.topology),
        f"{one.scenario.topology.num_devices:,}",
        f"{figures.request_rate:,.1f}",
        f"{figures.attainment:.1%}",
        f"{figures.goodput:,.1f}",
        f"{figures.output_rate:,.0f}",
        *(f"{number:,.1f}" for number in numbers),
        f"{one.utilization:.0%}",
        f"{one.hit_rate:.0%}",
    )


def summary(one: Simulation) -> dict[str, Any]:
    """As JSON: what was simulated, and every figure."""
    scenario, topology = one.scenario, one.scenario.topology
    rate = scenario.workload.rate
    return {
        "model": scenario.shape.name,
        "device": scenario.device.name,
        "device_is_measured": scenario.device.is_measured,
        "num_devices": topology.num_devices,
        "tensor_parallel_size": topology.tensor_size,
        "pipeline_parallel_size": topology.pipeline_size,
        "data_parallel_size": topology.data_size,
        "enable_expert_parallel": topology.has_expert_parallel,
        "router": scenario.router,
        "request_rate": None if scenario.trace or rate == math.inf else rate,
        "max_concurrency": scenario.max_concurrency,
        "simulated_replicas": one.num_simulated,
        "simulated_seconds": one.simulated_seconds,
        "kv_cache_tokens": one.num_kv_tokens,
        "utilization": one.utilization,
        "prefix_hit_rate": one.hit_rate,
        "num_preempted": one.num_preempted,
        **dataclasses.asdict(one.figures),
    }
