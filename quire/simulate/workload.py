"""The requests of a simulation: a trace file, or drawn from lengths, a rate and shared prefixes with a seed.

A trace is JSON lines: {"arrival": seconds, "prompt_tokens": n, "output_tokens": n}, with optional "prefix_group" (a
name; requests of a group begin with the same tokens) and "prefix_tokens" (how many; the whole prompt if left out).
Of a fleet too large to simulate, FleetShare says which part of the load a few of its replicas see.
Must not know: replicas, cost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from quire.bench.arrivals import ArrivalProcess, arrival_times
from quire.schema.errors import InputError

MOST_BYTES = 256 << 20  # of a trace file
MOST_LINES = 1_000_000
MOST_LENGTH = 10_000_000  # tokens
MOST_SECONDS = 10_000_000.0


class SimulatedRequest(NamedTuple):
    arrival: float  # seconds
    prompt_tokens: int
    output_tokens: int
    group: int = -1  # requests of one group begin with the same tokens; -1: of none
    prefix_tokens: int = 0


class FleetShare(NamedTuple):
    """Replicas that are simulated, of all there are. `in_turn`: a router that sends requests to replicas in turn."""

    simulated: int
    total: int
    in_turn: bool

    @property
    def fraction(self) -> float:
        return self.simulated / self.total


class TraceLine(msgspec.Struct, kw_only=True):
    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix_group: str | int | None = None
    prefix_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths are uniform between (1 - range_ratio) and (1 + range_ratio) times the mean."""

    rate: float = math.inf  # requests a second, of the whole fleet
    burstiness: float = 1.0
    input_len: int = 1024  # besides the prefix
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        ArrivalProcess(rate=self.rate, burstiness=self.burstiness)
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("num_prefixes", 1)):
            value = getattr(self, name)
            if not low <= value <= MOST_LENGTH:
                flag = "--" + name.replace("_", "-")
                raise InputError(
                    f"{flag} must be between {low} and {MOST_LENGTH}, got {value}", param=name, value=value
                )
        if not 0 <= self.range_ratio < 1:
            raise InputError(f"--range-ratio must be in [0, 1), got {self.range_ratio}", param="range_ratio")

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may be drawn."""
        return self.prefix_len + sum(
            _between(length, self.range_ratio)[1] for length in (self.input_len, self.output_len)
        )

    def draw(self, count: int, share: FleetShare) -> list[SimulatedRequest]:
        """So many requests of those that this part of a fleet sees."""
        random = Random(self.seed)
        times = self._arrivals(count, share, random)
        num_prefixes = max(1, round(self.num_prefixes * share.fraction)) if not share.in_turn else self.num_prefixes
        requests = []
        for time in times:
            own = random.randint(*_between(self.input_len, self.range_ratio))
            output = random.randint(*_between(self.output_len, self.range_ratio))
            group = random.randrange(num_prefixes) if self.prefix_len else -1
            requests.append(SimulatedRequest(time, own + self.prefix_len, output, group, self.prefix_len))
        return requests

    def _arrivals(self, count: int, share: FleetShare, random: Random) -> list[float]:
        if self.rate == math.inf or share.simulated == share.total:
            return arrival_times(count, ArrivalProcess(rate=self.rate, burstiness=self.burstiness), random)
        if share.in_turn:
            return self._every_turn(count, share, random)
        # A random part of a renewal process is one whose gaps are sums of a geometric number of gaps: its squared
        # coefficient of variation lies between the process's own and 1.
        variation = 0.0 if self.burstiness == math.inf else 1 / self.burstiness
        part = share.fraction * variation + (1 - share.fraction)
        return arrival_times(count, ArrivalProcess(rate=self.rate * share.fraction, burstiness=1 / part), random)

    def _every_turn(self, count: int, share: FleetShare, random: Random) -> list[float]:
        """The exact times at which the first replicas have their turns: gaps add up over the turns of others."""
        times, now = [], 0.0
        for index in range(count):
            turns = share.total - share.simulated + 1 if index and index % share.simulated == 0 else 1
            if self.burstiness == math.inf:
                now += turns / self.rate
            else:
                now += random.gammavariate(turns * self.burstiness, 1 / (self.rate * self.burstiness))
            times.append(now)
        return times


def _between(length: int, ratio: float) -> tuple[int, int]:
    return max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))


def read_trace(path: str | Path) -> list[SimulatedRequest]:
    """All of a trace, by arrival; an InputError names the line that is wrong."""
    try:
        size = os.path.getsize(path)
    except OSError as wrong:
        raise InputError(f"--trace {str(path)!r} cannot be read: {wrong.strerror}", param="trace") from None
    if size > MOST_BYTES:
        raise InputError(f"--trace {str(path)!r} has {size} bytes; at most {MOST_BYTES} are read", param="trace")
    requests = sorted(_lines(Path(path)), key=lambda request: request.arrival)
    if not requests:
        raise InputError(f"--trace {str(path)!r} holds no request", param="trace")
    return requests


def _lines(path: Path) -> Iterator[SimulatedRequest]:
    decoder = msgspec.json.Decoder(TraceLine)
    groups: dict[str | int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if number > MOST_LINES:
                raise InputError(f"{path}: at most {MOST_LINES} lines are read", param="trace")
            try:
                entry = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
                raise InputError(f"{path}, line {number}: {wrong}", param="trace") from None
            yield _request(entry, f"{path}, line {number}", groups)


def _request(entry: TraceLine, place: str, groups: dict[str | int, int]) -> SimulatedRequest:
    if not 0 <= entry.arrival <= MOST_SECONDS:
        raise InputError(
            f"{place}: arrival must be between 0 and {MOST_SECONDS:g} s, got {entry.arrival}", param="trace"
        )
    shared = entry.prompt_tokens if entry.prefix_tokens is None else entry.prefix_tokens
    for name, value in (("prompt_tokens", entry.prompt_tokens), ("output_tokens", entry.output_tokens)):
        if not 1 <= value <= MOST_LENGTH:
            raise InputError(f"{place}: {name} must be between 1 and {MOST_LENGTH}, got {value}", param="trace")
    if entry.prefix_group is None:
        return SimulatedRequest(entry.arrival, entry.prompt_tokens, entry.output_tokens)
    if not 0 <= shared <= entry.prompt_tokens:
        raise InputError(
            f"{place}: prefix_tokens={shared} is not within the prompt's {entry.prompt_tokens}", param="trace"
        )
    group = groups.setdefault(entry.prefix_group, len(groups))
    return SimulatedRequest(entry.arrival, entry.prompt_tokens, entry.output_tokens, group, shared)


def thin(requests: Sequence[SimulatedRequest], share: FleetShare) -> list[SimulatedRequest]:
    """What this part of a fleet sees of a trace: the turns of its replicas, or whole groups and single requests that
    are drawn."""
    if share.simulated == share.total:
        return list(requests)
    if share.in_turn:
        return [request for index, request in enumerate(requests) if index % share.total < share.simulated]
    random, chosen = Random(0), {}
    remaining = []
    for request in requests:
        if request.group < 0:
            is_seen = random.random() < share.fraction
        else:
            if request.group not in chosen:
                chosen[request.group] = random.random() < share.fraction
            is_seen = chosen[request.group]
        if is_seen:
            remaining.append(request)
    return remaining
